"""Methods of Trainer and its accelerator that a pipeline replaces; most of them defer where a run needs none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from hf_pipetransformer.comm.groups import let_group_threads_finish
from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.data.loader import Request, note_request
from hf_pipetransformer.options.refusals import check_dataset
from hf_pipetransformer.report.origin import outcome_of


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.runtime.pipeline import PipelineShell
    from hf_pipetransformer.training.session import Session


def left_to_trainer(overrides: type) -> type:
    """Make each method of a class defer to the next one in the MRO while `self.pipeline_run` is left to Trainer.

    During Trainer's own constructor, before `pipeline_run` exists, no method defers.
    """
    for name, method in list(vars(overrides).items()):
        if isinstance(method, FunctionType):
            setattr(overrides, name, _giving_way(overrides, name, method))
    return overrides


def _giving_way(overrides: type, name: str, method: FunctionType) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = vars(self).get("pipeline_run")
        if run is not None and run.is_left_to_trainer:
            return getattr(super(overrides, self), name)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return call


# The class after the mixin in the MRO is a Trainer, whose methods these override.
_Trainer: Any = object


@left_to_trainer
class PipelineOverrides(_Trainer):
    """Methods of Trainer that a pipeline replaces."""

    pipeline_run: Session
    args: PipeTransformerArguments

    # ---- training ----

    # Refused at once: backends swallow what a trial raises, and the flag that Trainer sets for them outlives an error.
    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a trial would have to start and stop on all ranks of a pipeline together."""
        raise ValueError(
            "hyperparameter_search is not supported with a pipeline: start one run per setting, or use Trainer."
        )

    # Not `prepare` of the accelerator: evaluations in a training ask for the bare model, and prepare nothing.
    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> PipelineShell:
        return self.pipeline_run.pipelined.shell

    # The one place where the loop takes another loader, and where a checkpoint can be kept from Trainer, which would
    # unpickle it.
    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        run = self.pipeline_run.pipelined
        # The optimizer must include parameters that are frozen now but may unfreeze.
        with nullcontext() if run.is_waiting else run.pipeline.stage.store.all_active():
            # Without a checkpoint: `prepare` restores it, once parameters and their groups are known by name.
            given = run.late.given if run.is_waiting else run.loader
            model, loader = super()._prepare_for_training(max_steps, given, None)
        run.prepare(max_steps)
        return model, run.late if run.is_waiting else loader

    # The first method of the loop that is given the loader.
    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Begin the training and return Trainer's epoch and step counts.

        They differ from Trainer's when a run resumes with batches of another size.
        """
        run = self.pipeline_run.pipelined
        if self.args.plan_only:
            values = super().set_initial_training_values(args, dataloader)
            run.print_plan(dataloader, values)
            return values
        dataloader = run.begin(dataloader)
        values = super().set_initial_training_values(args, dataloader)
        return run.counts(values, dataloader)

    # Trainer finds the place in the data from the number of steps alone, which batches of another size make wrong.
    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        place: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        resumption = self.pipeline_run.pipelined.resumption
        start = None if resumption is None else resumption.start
        return place if start is None else (start.epoch, start.first)

    # A resumed epoch is shorter, and one may have nothing left: callbacks can change neither.
    def _run_epoch(self, **kwargs: Any) -> None:
        # Without a checkpoint: Trainer would skip batches in a loader of accelerate's, and set RNG states too late.
        kwargs["resume_from_checkpoint"] = None
        with self.pipeline_run.pipelined.epoch(kwargs) as goes_on:
            if goes_on:
                super()._run_epoch(**kwargs)

    # The one place between two steps that comes before the next batches are read: layouts change here.
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Fetch the batches of one optimizer step, and count the items of their losses over all replicas.

        The first time, the pipeline is started with the first batch.
        """
        self.pipeline_run.pipelined.start()
        if self.pipeline_run.is_left_to_trainer:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        return self.pipeline_run.pipelined.training.begin_step(epoch_iterator, num_batches)

    # Later stages are given copies of the batch, and the sum over ranks would count each of them.
    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return Trainer's estimate on one rank per pipeline, and 0 on the others."""
        run = self.pipeline_run.pipelined
        if not run.counts_inputs:
            return 0
        known, count = run.operations, super().floating_point_ops
        if getattr(count, "__func__", None) is not Trainer.floating_point_ops:
            return int(count(inputs))
        # Trainer's follows from shapes, and counting parameters takes milliseconds in which a GPU may wait.
        shapes = tuple((name, tuple(value.shape)) for name, value in inputs.items() if isinstance(value, torch.Tensor))
        if shapes not in known:
            known[shapes] = int(count(inputs))
        return known[shapes]

    # Trainer gathers over all ranks, of which those without samples do not come by, and others have copies.
    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        with self.pipeline_run.pipelined.counting_tokens() as counts_here:
            if inputs and counts_here:
                super()._track_num_input_tokens(inputs)

    # Nothing public is called between the last step and the final log, which needs the mean loss of all ranks.
    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        losses = self.pipeline_run.context.topology.gather(self._tr_loss.item())
        # Times 0, so that device and dtype stay those of Trainer's tensor.
        self._tr_loss = self._tr_loss * 0 + sum(losses) / len(losses)
        self.pipeline_run.pipelined.finish()
        output: TrainOutput = super()._finalize_training(*args, **kwargs)
        outcome = outcome_of(self, self.pipeline_run.results)
        self.pipeline_run.context.journal.write(
            "end", train_loss=output.training_loss, metrics=output.metrics, **outcome
        )
        return output

    # ---- loaders, evaluation and prediction ----

    # The accelerator, which prepares every loader, is not told what it is for.
    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:  # fmt: skip
        """Make Trainer's loader and note the request on it, from which the pipeline later makes its own loader."""
        check_dataset(dataset, description.lower())
        request = Request(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
        sampler = None if sampler_fn is None else request.sampler
        loader = super()._get_dataloader(dataset, description, batch_size, sampler, is_training, dataloader_key)
        note_request(loader, request)
        return loader

    # Only here it is known that predictions are dropped once the metrics are computed.
    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as `Trainer.evaluate` does, through the pipeline; every rank gets the same metrics."""
        with self.pipeline_run.pipelined.evaluations.call(eval_dataset, "get_eval_dataloader", is_metrics_only=True):
            return super().evaluate(eval_dataset, *args, **kwargs)

    # The pipeline starts before Trainer measures the time, and callbacks may read the whole model until the end.
    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Predict as `Trainer.predict` does, through the pipeline; every rank gets all predictions in order."""
        with self.pipeline_run.pipelined.evaluations.call(test_dataset, "get_test_dataloader"):
            return super().predict(test_dataset, *args, **kwargs)

    # The only method that is given the loader to read.
    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run Trainer's loop; with more than one stage, refuse a loader that this trainer did not make."""
        with self.pipeline_run.pipelined.evaluations.loop(dataloader) as evaluation:
            output = super().evaluation_loop(
                evaluation.loader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        return evaluation.completed(output, metric_key_prefix)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Return a data set of DPOTrainer with what the reference says of it, computed on the stages.

        Collective: call on every rank. TRL's constructor computes nothing, see `trl_compat.precompute_reference`.
        """
        run = vars(self).get("pipeline_run")
        if run is None and self.args.is_on_stages:
            return dataset
        found = None if run is None else run.pipelined.evaluations.reference_of(dataset, batch_size)
        return super()._precompute_ref_logps(dataset, name, batch_size) if found is None else found

    # ---- models and checkpoints, saved and loaded ----

    # Callable at any time, also without a checkpoint, while each rank has one stage.
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model for `from_pretrained`, on rank 0. Collective: call on every rank."""
        with self.pipeline_run.pipelined.weights.saving() as lends:
            if not lends:
                super().save_model(output_dir, _internal_call)
                return
            # Trainer's method takes no state to write, of which rank 0 fetches the values as it writes.
            with self.pipeline_run.pipelined.weights.lent_state() as state:
                self._save(output_dir, state)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    # Trainer's files only where plain Trainer could resume with them.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.pipeline_run.pipelined.training.checkpoints.are_trainers_too:
            super()._save_optimizer_and_scheduler(output_dir)

    # The last call on all ranks before rank 0 completes the checkpoint.
    def _save_rng_state(self, output_dir: str) -> None:
        checkpoints = self.pipeline_run.pipelined.training.checkpoints
        if checkpoints.are_trainers_too and self.args.world_size == 1:
            super()._save_rng_state(output_dir)  # With several processes, RNG states differ from Trainer's.
        checkpoints.save(output_dir, trainer_compat.unlogged_loss(self))

    # Trainer would load the whole model on every rank.
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check that the weights fit, of which Trainer's own only warns; each rank reads those of its stage later."""
        self.pipeline_run.pipelined.weights.expect(resume_from_checkpoint)

    # The stages stay until here, so that each reads its own weights.
    def _load_best_model(self) -> None:
        """Load the best weights; Trainer's own skips models that are saved under other parameter names (ViT)."""
        run = self.pipeline_run.pipelined
        if not run.weights.load_best(run.pipeline.stage):
            super()._load_best_model()
        run.weights.give_back()


class PipelineAccelerator(Accelerator):
    """`Accelerator` of a model on stages: each rank has a part of the gradients, and some ranks compute no loss.

    It takes over all that Trainer's own has, which is used no more. Without a training in stages it does the same.
    """

    def __init__(self, own: Accelerator) -> None:
        # Not Accelerator's constructor: its settings are made from options that only Trainer reads.
        self.__dict__.update(vars(own))
        self.session: Session | None = None
        """What the pipeline adds to the trainer; None in the trainer's constructor."""

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip by the norm of the whole model's gradients, which is returned. Collective: call on every rank."""
        if self.session is None or not self.session.is_training_in_pipeline:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        return self.session.pipelined.training.clip_gradients(max_norm)

    @contextmanager
    def as_one_process(self, gathers: bool = False) -> Iterator[None]:
        """Wrap code of Trainer, TRL or the script that computes what one process would, but that only some ranks run.

        Trainer multiplies losses by the number of processes to undo a mean over them, and so do scripts: ours is a
        sum. What gathers, reduces or waits through accelerate finds no other process.

        Args:
            gathers: all ranks run the code, which may gather inside.
        """
        alone = {"num_processes": 1, **({} if gathers else {"distributed_type": DistributedType.NO})}
        # The process's own state is what gathers; Trainer's multiplies.
        of_process = trainer_compat.with_attributes(PartialState(), {} if gathers else alone)
        with trainer_compat.with_attributes(self.state, alone), of_process:
            yield

    def end_training(self) -> None:
        """Leave the process group, once the threads of the pipeline's own groups have ended."""
        let_group_threads_finish()
        super().end_training()
