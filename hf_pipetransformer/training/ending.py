"""The model after a training: put together on every rank, or left on its stages, and put together for the next one."""

from __future__ import annotations

from typing import Any

from hf_pipetransformer.elastic.migration import OptimizerState
from hf_pipetransformer.report import announce
from hf_pipetransformer.runtime.gathering import check_whole, end_training, least_room, make_whole, num_bytes_of
from hf_pipetransformer.runtime.stage import Stage
from hf_pipetransformer.training.starting import Starter


class Ending:
    """Gives the model back after each training of a trainer, as `pipeline_gather_at_end` says."""

    def __init__(self, starter: Starter) -> None:
        self.starter = starter
        self._users_optimizer: OptimizerState | None = None
        self._refusal: Any = None
        """Handle of the hook that refuses to run a model that is split."""

    def begin(self, users_optimizer: OptimizerState | None) -> None:
        """Note the optimizer of the training that ends, if it is the user's: it goes back with the model."""
        self._users_optimizer = users_optimizer

    def give_back(self) -> None:
        """Give the user the model after a training, once. Collective: call on every rank."""
        stage = self.starter.pipeline.stage
        if not stage.is_training:
            return
        end_training(stage)
        reason = self._why_split(stage) if stage.is_spread else None
        if reason is None:
            make_whole(stage)
        else:
            self._refuse_calls(stage)
            if self.starter.context.topology.rank == 0:
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
        if not self.starter.is_started(None):
            return
        stage = self.starter.pipeline.stage
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
        if self._refusal is not None:
            self._refusal.remove()

    def _why_split(self, stage: Stage) -> str | None:
        """Return why the model stays split; None to gather it. Collective: call on every rank."""
        wanted = self.starter.context.args.pipeline_gather_at_end
        if wanted != "auto":
            return None if wanted == "always" else "pipeline_gather_at_end='never'"
        room = least_room(num_bytes_of(stage.store.named()), stage.settings.topology)
        return None if 2 * room.needed <= room.free else f"whole models would take over half of a node ({room})"

    def _refuse_calls(self, stage: Stage) -> None:
        view = stage.view

        def refuse(model: Any, _inputs: Any) -> None:
            # Meta tensors would give outputs without values, and no error.
            if not view.is_installed:
                check_whole(model)

        self._refusal = view.model.register_forward_pre_hook(refuse)

    def _give_optimizer_back(self, stage: Stage) -> None:
        if self._users_optimizer is not None:
            held = stage.store.held()
            self._users_optimizer.hold({name: p for name, p in held.items() if p.requires_grad}, {})
