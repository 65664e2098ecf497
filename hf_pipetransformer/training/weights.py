"""Weights of the model: each rank reads its stage's from a checkpoint, rank 0 saves those of all stages, and after the
last step the model is put together on every rank or left on its stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.report import announce, logger
from hf_pipetransformer.runtime.gathering import (
    check_whole,
    end_training,
    fetching,
    least_room,
    make_whole,
    num_bytes_of,
    whole_on_first_rank,
)
from hf_pipetransformer.splitters import adapters
from hf_pipetransformer.splitters.adapters import has_adapters
from hf_pipetransformer.state.deferred import deferred_state, why_not_deferred, write_tensors
from hf_pipetransformer.state.weights import find_weights, has_weights, is_of_adapters, load_weights


if TYPE_CHECKING:
    from hf_pipetransformer.runtime.optimizer_state import OptimizerState
    from hf_pipetransformer.runtime.stage import Stage
    from hf_pipetransformer.training.pipeline_session import PipelineSession


class ModelWeights:
    """Reads, saves and puts together the weights of a trainer's model, of which each rank may have one stage.

    Trainer resumes before the model is split, when no rank knows its stage. After a training it is given back as
    `pipeline_gather_at_end` says.
    """

    def __init__(self, run: PipelineSession) -> None:
        self.run = run
        self.context = run.context
        self.expected: str | None = None
        """Folder of weights that `load_expected` loads."""
        self.users_optimizer: OptimizerState | None = None
        """Optimizer of the training that ends, if it is the user's: it goes back with the model."""
        self._refusal: Any = None
        """Handle of the hook that refuses to run a model that is split."""
        self._warned: set[str] = set()

    # ---- from a checkpoint ----

    def expect(self, folder: str) -> None:
        """Check that saved weights fit, and expect them. Collective: call on every rank.

        Adapters are loaded at once.

        Raises:
            ValueError: on every rank, if they do not fit.
        """
        model, topology = self.context.trainer.model, self.context.topology
        if topology.together(lambda: is_of_adapters(folder)):
            # Before the adapters are read into the weights, whose half precision would round them.
            self.run.session.cast_to_masters()
            topology.together(lambda: load_weights(model, folder))
            return
        self.expected = folder
        if topology.together(lambda: find_weights(model, folder)) is None and topology.rank == 0:
            announce(
                f"transformers makes tensors of {type(model).__name__} from several in {folder!r}: every rank reads "
                "all of them and keeps those of its stage."
            )

    def load_expected(self, stage: Stage | None) -> None:
        """Load what a stage uses of the weights to resume from, if any; all of them if there is no stage.

        Collective: call on every rank.
        """
        folder, self.expected = self.expected, None
        if folder is not None:
            self._load(folder, stage)

    def load_best(self, stage: Stage) -> bool:
        """Load what a rank holds of the best model; False if it was not saved. Collective: call on every rank.

        That is a stage, or the whole model where it is put together before a user's method calls this.
        """
        state = self.context.trainer.state
        folder = state.best_model_checkpoint
        if not self.context.topology.decide(lambda: has_weights(folder)):
            return False
        logger.info(f"Loading the best model from {folder} (score: {state.best_metric}).")
        self._load(folder, stage)
        return True

    def _load(self, folder: str, stage: Stage | None) -> None:
        # Of other stages a rank has meta tensors, which have no memory to read into.
        names = stage.own_names() | stage.own_buffers() if stage is not None and stage.is_spread else None
        self.context.topology.together(lambda: load_weights(self.context.trainer.model, folder, names))

    # ---- back to the user ----

    def give_back(self) -> None:
        """Give the user the model after a training, once. Collective: call on every rank."""
        stage = self.run.pipeline.stage
        if not stage.is_training:
            return
        end_training(stage)
        reason = self._why_split(stage) if stage.is_spread else None
        if reason is None:
            make_whole(stage)
        else:
            self._refuse_calls(stage)
            if self.context.topology.rank == 0:
                announce(
                    f"The model stays on its {stage.layout.shape_in_words}: {reason}. On every process save_model, "
                    "push_to_hub, evaluate and predict work as before; train() first puts the model together. Other "
                    "code reads it within trainer.whole_model(), or set pipeline_gather_at_end='always'."
                )
        self._give_optimizer_back(stage)
        stage.view.remove()

    def put_together(self) -> None:
        """Make the trainer's model whole for another training, if the last one left it split. Collective.

        Raises:
            ValueError: on every rank, if it does not fit in the memory of a node.
        """
        if not self.run.is_started(None):
            return
        stage = self.run.pipeline.stage
        if stage.is_training or not stage.is_spread:
            return
        missing = {name: p for name, p in stage.store.named().items() if p.is_meta}
        room = least_room(num_bytes_of(missing), stage.settings.topology)
        if room.needed > room.free:
            raise ValueError(
                f"train() was called again, and a training starts from the whole model on every process, which does "
                f"not fit ({room} on a node). Write it with save_model, and start the script again from there."
            )
        make_whole(stage)
        self._give_optimizer_back(stage)
        # The model is whole from here on, and anyone may call it.
        if self._refusal is not None:
            self._refusal.remove()

    def _why_split(self, stage: Stage) -> str | None:
        """Return why the model stays split; None to gather it. Collective: call on every rank."""
        wanted = self.context.args.pipeline_gather_at_end
        if wanted != "auto":
            return None if wanted == "always" else "pipeline_gather_at_end='never'"
        room = least_room(num_bytes_of(stage.store.named()), stage.settings.topology)
        # Half of a node stays free for what the script does next.
        return None if 2 * room.needed <= room.free else f"whole models would take over half of a node ({room})"

    def _refuse_calls(self, stage: Stage) -> None:
        view = stage.view

        def refuse(model: Any, _inputs: Any) -> None:
            # Meta tensors would give outputs without values, and no error.
            if not view.is_installed:
                check_whole(model)

        self._refusal = view.model.register_forward_pre_hook(refuse)

    def _give_optimizer_back(self, stage: Stage) -> None:
        if self.users_optimizer is not None:
            held = stage.store.held()
            self.users_optimizer.hold({name: p for name, p in held.items() if p.requires_grad}, {})

    # ---- into files ----

    @contextmanager
    def saving(self) -> Iterator[bool]:
        """Wrap `save_model`; yields True if `lent_state` is to be saved. In training or split, collective."""
        pipeline, topology, timeouts = self.run.in_force, self.context.topology, self.context.timeouts
        stage = None if pipeline is None else pipeline.stage
        if pipeline is None or stage is None or not (stage.is_training or stage.is_spread):
            with timeouts.reporting_faults(together=False):
                yield False
            return
        pipeline.settle()
        # Rank 0 alone knows what its files need; the other ranks send what it names, in the same order.
        names = topology.decide(self._gathered_to_save) if stage.is_spread else None
        with timeouts.reporting_faults(), whole_on_first_rank(stage, names):
            yield names == [] and stage.groups.replica == 0
            # Until the files are written: what follows on any rank may read them.
            topology.barrier()

    def _gathered_to_save(self) -> list[str] | None:
        """Return the parameters that rank 0 must hold before Trainer saves; None for all. Called on rank 0."""
        trainer = self.context.trainer
        why = trainer_compat.why_gathered_to_save(trainer)
        if why is None and has_adapters(trainer.model):
            # Never an empty list, which stands for a state that is fetched as it is written.
            return adapters.saved_names(trainer.model) or None
        why = why or why_not_deferred(trainer.model)
        if why is not None and why not in self._warned:
            self._warned.add(why)
            size = sum(each.numel() * each.element_size() for each in trainer.model.parameters())
            logger.warning(f"Saving gathers the whole model in the memory of rank 0 ({size / 2**20:.1f} MiB): {why}.")
        return [] if why is None else None

    @contextmanager
    def lent_state(self) -> Iterator[dict[str, Any] | None]:
        """Wrap the writing of a spread model's files; on rank 0, yields the state dict to write.

        Collective: call on every rank of the first replica.
        """
        with fetching(self.run.pipeline.stage) as fetch:
            if self.context.topology.rank != 0:
                yield None
                return
            with trainer_compat.writing_tensors_with(partial(write_tensors, fetch=fetch)):
                yield deferred_state(self.context.trainer.model)
