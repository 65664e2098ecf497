"""`PipeTransformerTrainer`: `transformers.Trainer` over a pipeline. Overrides only; the work is done below."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers.trainer_utils import TrainOutput

from hf_pipetransformer.autodp.loader import PipelineLoader
from hf_pipetransformer.autodp.migration import keep_parameters
from hf_pipetransformer.autodp.topology import let_group_threads_finish
from hf_pipetransformer.pipeline.shared import share_values
from hf_pipetransformer.report.events import announce
from hf_pipetransformer.run import host
from hf_pipetransformer.run.loaders import share_generator
from hf_pipetransformer.staging import is_apart
from hf_pipetransformer.trainer.filtering import SelfFilteringLoss
from hf_pipetransformer.trainer.resuming import ResumingTrainer
from hf_pipetransformer.transition import Stage, make_whole, whole_on_first_rank


class PipeTransformerTrainer(ResumingTrainer):
    """A `Trainer` whose model is split into K pipeline stages and R replicas, with the same numbers as `Trainer`.

    Start it with `accelerate launch`; `K * R` is the number of processes. Takes everything that `Trainer` takes.

    Args:
        args ([`PipeTransformerArguments`]): `TrainingArguments` with the pipeline's options.
        splitter ([`Splitter`], *optional*): how the model falls into layers, for models that the library does not
            know; by default it is found by `config.model_type`.

    Raises:
        ValueError: an option, model or data set that cannot work with a pipeline; the text says what to change.
    """

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as `Trainer.train` does; afterwards `trainer.model` is whole on every rank.

        A run goes on from one of its checkpoints, to the bit under the same settings and on as many processes;
        elsewhere, or from a checkpoint of plain Trainer, it goes on too and says what differs.

        Raises:
            ValueError: something that cannot work with a pipeline, or a checkpoint that this run cannot go on from.
            PipelineError: another rank failed; the text names the first cause.
        """
        try:
            with self.run.patience.reporting_faults(), self._resuming(resume_from_checkpoint) as folder:
                return super().train(folder, trial, ignore_keys_for_eval)
        finally:
            self._end_cache()
            self._leave_model()

    def _leave_model(self) -> None:
        """Also after an error: a later training of the same model, or of the user's optimizer, is none of ours.

        A model that an error left on several stages stays there; a whole one may be trained again.
        """
        for hook in self._optimizer_hooks:
            hook.remove()
        stage = self._stage
        if stage is None or stage.reducer is None:
            return
        if stage.layout.pipeline_size > 1:
            stage.reducer.remove()
        else:
            self._give_model_back(stage)

    def _give_model_back(self, stage: Stage) -> None:
        """The model is whole and as its user gave it, on every rank. A collective call for several stages."""
        make_whole(stage)
        self._end_adapting()
        stage.view.remove()

    def end(self) -> None:
        """Leave the process group: the last line of a script."""
        let_group_threads_finish()
        super().end()

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a trial would have to start and stop on all ranks of a pipeline together."""
        raise ValueError(
            "hyperparameter_search is not supported with a pipeline: start one run per setting, or use Trainer."
        )

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        self._forget_own_optimizer()
        self._name_of = {id(parameter): name for name, parameter in self.model.named_parameters()}
        stage = self._start(self.train_dataset, is_training=True)
        self._announce_start()
        self.run.pipeline.shared_generator = share_generator(self.topology)
        self.run.seeds.part(stage)
        self.run.seeds.num_starts += 1
        with stage.active():
            return super()._inner_training_loop(*args, **kwargs)

    def _announce_start(self) -> None:
        assert self._stage is not None
        layout = self._stage.layout
        policy = self.run.policy.describe() if self._replayed_layouts is None else "replayed"
        fields = self.run.pipeline.start_up.plans.describe(layout, self.args.per_device_train_batch_size, policy)
        step, epoch = 0, 0.0
        if self._resumption is not None:
            step, epoch = self._resumption.step, self._resumption.state["epoch"]
            fields["resumed_from"] = self._resumption.folder
        self.events.write("run", step, epoch, layout=layout.as_event(), **fields)
        if self.is_world_process_zero():
            announce(f"PipeTransformer: {layout}, {layout.schedule}. {fields['expectation']}")

    def _divide_optimizer(self, stage: Stage) -> None:
        """Leave this stage its parameters of the optimizer, whoever made it, in the groups that they are in.

        A parameter that stages share is stepped by its first user, the others get the value.
        """
        optimizer = host.torch_optimizer(self)
        if stage.layout.pipeline_size > 1:
            now = {id(parameter): name for name, parameter in self.model.named_parameters()}
            self._group_of = keep_parameters(optimizer, {**self._name_of, **now}, self._trained_here())
        self._optimizer_hooks = [optimizer.register_step_post_hook(self._after_optimizer_step)]

    @contextmanager
    def whole_model(self) -> Iterator[None]:
        """Inside, `trainer.model` is whole and has its own forward, on every rank; what is changed in it stays.

        A collective call: every rank enters and leaves it, between two steps of a training or outside.

        Raises:
            ValueError: it is called amid a step, where other stages do not come by.
        """
        with nullcontext() if self.run.in_force is None else self.run.in_force.whole_model():
            yield

    def _after_optimizer_step(self, *_args: Any) -> None:
        if self._stage is not None:
            share_values(self._stage.shared)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        assert self._stage is not None
        if not isinstance(train_dataloader, PipelineLoader) and self.topology.world_size > 1:
            raise ValueError(
                f"get_train_dataloader returned a {type(train_dataloader).__name__}, which knows nothing of stages. "
                "Build it with self._get_dataloader, or override _get_train_sampler or the data collator instead."
            )
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._divide_optimizer(self._stage)
        self._begin_adapting(train_dataloader, max_steps)
        return prepared

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Fetch the batches of one optimizer step and count, over all replicas, what their losses average over.

        Before it, between two steps, the layout may change.
        """
        if self._steps.are_over(epoch_iterator):
            return [], None
        self._between_steps()
        batches = self._steps.begin(epoch_iterator, num_batches)
        self.run.patience.enter_step()
        return batches

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward, backward and, at the end of an accumulation, reduction of one loader batch.

        Returns:
            A scalar whose mean over all ranks is the batch's loss. Trainer's loop adds it up without reading it.
        """
        write = None if self._cache is None else self._cache.write
        share = self._steps.run(model, self._current(inputs, self._train_loader), num_items_in_batch, write)
        is_own = not host.is_overridden(self, "training_step")
        if self.args.logging_nan_inf_filter and is_own:
            return SelfFilteringLoss.of(share, 1 + self.state.global_step - self._globalstep_last_logged)
        return share

    def _prepare_input(self, data: Any) -> Any:
        """Trainer's, without waiting until a tensor has come to the device."""
        if isinstance(data, torch.Tensor) and is_apart(self.args.device):
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def get_tp_size(self) -> int:
        """Trainer multiplies losses by the ranks that do not share a batch, to undo a mean; this trainer sums."""
        return self.args.world_size

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of one optimizer step, the same for every layout."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        with self.run.pipeline.settings.meter.part("optimizer"):
            norm = self._global_grad_norm()
            self._steps.clip(norm)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._global_grad_norm() if grad_norm is None else grad_norm

    def _global_grad_norm(self) -> torch.Tensor:
        squares = self._steps.gradient_squares()
        # The embeddings' norm is no layer's, but a step that they overflow in is skipped: infinity times 0 tells.
        self._watch_gradients(squares[:-1] + 0 * squares[-1])
        return squares.sum().sqrt().float()

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Trainer's estimate, counted once per pipeline."""
        counts_here = self._stage is None or self._stage.groups.is_first
        return int(super().floating_point_ops(inputs)) if counts_here else 0

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        if self.args.include_num_input_tokens_seen == "no":
            return
        before = self.state.num_input_tokens_seen
        if inputs and (self._stage is None or self._stage.groups.is_first):
            with _gathering_nothing(self.accelerator):
                super()._track_num_input_tokens(inputs)
        own = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + sum(self.topology.gather(own))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        assert self._stage is not None
        total = sum(self.topology.gather(self._tr_loss.item()))
        self._tr_loss = self._tr_loss * 0 + total / self.topology.world_size
        self._give_model_back(self._stage)
        shared, self.run.pipeline.shared_generator = self.run.pipeline.shared_generator, None
        if shared is not None:
            # Rank 0 reads streams, and draws more from it than the others.
            torch.set_rng_state(self.topology.broadcast(shared.get_state()).clone())
        output: TrainOutput = super()._finalize_training(*args, **kwargs)
        self.run.journal.write("end", train_loss=output.training_loss)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's log; the first training entry under a layout shows the layout as scalars."""
        if self.run.patience.is_resting:
            self.run.patience.rest()
        if "loss" in logs and self.layout is not None and self.layout is not self._logged_layout:
            self._logged_layout = self.layout
            logs.update(self.layout.as_scalars())
        if "loss" in logs:
            logs.update(self._cache_scalars)
            self._cache_scalars = {}
        super().log(logs, start_time)

    # ---- saving ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a normal checkpoint for `from_pretrained`, whole, by rank 0. Call it on every rank."""
        stage = self._stage
        is_spread = stage is not None and stage.reducer is not None
        with (
            self.run.patience.reporting_faults(is_spread),
            whole_on_first_rank(stage) if is_spread and stage else nullcontext(),
        ):
            super().save_model(output_dir, _internal_call)
            if is_spread:
                self.topology.barrier()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        content = "model" if self.args.save_only_model else "full"
        self.run.journal.write("checkpoint", content=content)


@contextmanager
def _gathering_nothing(accelerator: Any) -> Iterator[None]:
    """`accelerator.gather` gives the own value back, for code that only some ranks run."""
    accelerator.gather = lambda value: value
    try:
        yield
    finally:
        del accelerator.gather
