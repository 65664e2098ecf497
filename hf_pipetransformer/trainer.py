"""`PipeTransformerTrainer`: `transformers.Trainer` over a pipeline. Overrides only; the work is done below."""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import datasets
import torch
from accelerate.utils.memory import clear_device_cache
from torch.nn.utils import clip_grads_with_norm_
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.faults import FaultBoard, is_second_hand
from hf_pipetransformer.autodp.gathering import ReplicaGather
from hf_pipetransformer.autodp.loader import PipelineLoader, make_pipeline_loader
from hf_pipetransformer.autodp.topology import get_topology
from hf_pipetransformer.errors import PipelineError
from hf_pipetransformer.execution import StageRunner
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.pipeline.loss_scaling import agree_on_overflow
from hf_pipetransformer.pipeline.microbatch import batch_size, count_items
from hf_pipetransformer.pipeline.shared import share_values
from hf_pipetransformer.pipeline.shell import PipelineShell
from hf_pipetransformer.refusals import (
    check_arguments,
    check_dataset,
    check_model,
    check_resume,
    warn_about_options,
)
from hf_pipetransformer.report.events import EventLog, announce, logger
from hf_pipetransformer.splitters import Splitter, find_splitter
from hf_pipetransformer.splitters.check import undisturbed
from hf_pipetransformer.startup import StartUp, check_agreement, probe_samples
from hf_pipetransformer.transition import Settings, Stage, apply_layout, make_whole, whole_on_first_rank


class PipeTransformerTrainer(Trainer):
    """A `Trainer` whose model is split into K pipeline stages and R replicas, with the same numbers as `Trainer`.

    Start it with `accelerate launch`; `K * R` is the number of processes. Takes everything that `Trainer` takes.

    Args:
        args ([`PipeTransformerArguments`]): `TrainingArguments` with the pipeline's options.
        splitter ([`Splitter`], *optional*): how the model falls into layers, for models that the library does not
            know; by default it is found by `config.model_type`.

    Raises:
        ValueError: an option, model or data set that cannot work with a pipeline; the text says what to change.
    """

    args: PipeTransformerArguments
    model_accepts_loss_kwargs: bool
    _tr_loss: torch.Tensor

    def __init__(
        self,
        model: PreTrainedModel | torch.nn.Module | None = None,
        args: PipeTransformerArguments | None = None,
        *positional: Any,
        splitter: Splitter | None = None,
        **named: Any,
    ) -> None:
        args = PipeTransformerArguments(output_dir="tmp_trainer") if args is None else args
        check_arguments(args)
        kwargs = inspect.signature(Trainer.__init__).bind(self, model, args, *positional, **named).arguments
        if model is not None:
            self._check_model(model, args, kwargs.get("optimizers", (None, None)))
        check_dataset(kwargs.get("train_dataset"), "training")
        for text in warn_about_options(args) if args.process_index == 0 else ():
            logger.warning(text)
        args.save_only_model = True
        super().__init__(model, args, *positional, **named)
        self.topology = get_topology(args.pipeline_timeout, int(os.environ.get("LOCAL_WORLD_SIZE") or args.world_size))
        if args.num_stages is not None:
            self.topology.check_num_stages(args.num_stages)
        check_agreement(self.topology, "training arguments", _comparable(args))
        self.events = EventLog(args.output_dir if self.is_world_process_zero() else None)
        self._splitter = splitter
        self._faults = FaultBoard(self.topology.rank, self.topology.world_size)
        self._guard_depth = 0
        self._stage: Stage | None = None
        self._start_up: StartUp | None = None
        self._shell: PipelineShell | None = None
        self._runner: StageRunner | None = None
        self._batch_items: deque[int] = deque()
        self._eval_gather: ReplicaGather | None = None
        self._num_starts = 0
        self._model_declares_loss_kwargs = self.model_accepts_loss_kwargs
        self._has_labels = False
        self._logged_layout: Layout | None = None
        self._random_state: torch.Tensor | None = None

    # ---- layout and life of the pipeline ----

    @property
    def layout(self) -> Layout | None:
        """The layout in force; None before the first training, evaluation or prediction."""
        return None if self._stage is None else self._stage.layout

    @staticmethod
    def _check_model(model: Any, args: PipeTransformerArguments, optimizers: tuple[Any, Any]) -> None:
        is_alone = args.world_size == 1
        check_model(
            model, 1 if is_alone else args.num_stages, is_alone and args.num_microbatches in (None, 1), optimizers
        )

    def _start(self, dataset: Any, is_training: bool) -> Stage:
        """The transition from nothing: probe the model, choose a layout, take this rank's stage."""
        args, device = self.args, self.args.device
        what = "Training" if is_training else "Evaluation"
        if dataset is None:
            raise ValueError(f"{what} needs a data set: pass {'train' if is_training else 'eval'}_dataset.")
        check_dataset(dataset, what.lower())
        self.model_accepts_loss_kwargs = self._model_declares_loss_kwargs
        check_agreement(self.topology, "data set", {"number of samples": len(dataset)})
        self._check_model(self.model, args, (None, None))
        splitter = self._splitter or find_splitter(self.model)
        self._shell = PipelineShell(self.model, self.accelerator.autocast, self.accelerator.native_amp)
        start_up = StartUp(self.model, splitter, args, self.topology, device)
        with undisturbed(self.model):
            samples = self.topology.broadcast(probe_samples(*self._dataset_and_collator(dataset, what)))
        self._has_labels = "labels" in samples
        needs_loss = is_training or all(samples.get(name) is not None for name in self.label_names)
        rule = start_up.run(samples, self._probe_loss if needs_loss else self._probe_output, self._count_items)
        if needs_loss and rule.ignores_num_items:
            # The model swallows num_items_in_batch; dividing by it, as Trainer then expects, would be wrong
            # (transformers#47688).
            self.model_accepts_loss_kwargs = False
        settings = Settings(device, args.pipeline_timeout, args.pipeline_checkpoint)
        layout = start_up.layout(self._samples_per_pipeline)
        stage = apply_layout(self.model, splitter, start_up.probe, self.topology, layout, settings, is_training)
        self._stage, self._start_up = stage, start_up
        self._runner = StageRunner(stage, start_up.probe.activation, rule.rule, self._loss_shifts_labels)
        self._shell.is_inside_step = lambda: stage.engine.is_active
        if layout.num_stages > 1:
            self._shell.run_pipeline = lambda inputs: self._runner.predict(inputs, self._predict_forward)  # type: ignore[union-attr]
        return stage

    def _samples_per_pipeline(self, num_stages: int) -> int:
        return self.args.per_device_train_batch_size * num_stages

    def _probe_loss(self, inputs: dict[str, Any], num_items: int) -> torch.Tensor:
        items = torch.tensor(num_items, device=self.args.device) if self._passes_num_items(inputs) else None
        loss: torch.Tensor = self.compute_loss(self._shell, dict(inputs), num_items_in_batch=items)
        return loss

    def _probe_output(self, inputs: dict[str, Any], num_items: int) -> torch.Tensor:
        assert self._shell is not None
        outputs = self._shell(**inputs)
        logits = outputs[0] if isinstance(outputs, tuple) else next(iter(outputs.values()))
        return logits.float().square().mean()

    def _predict_forward(self, inputs: dict[str, Any]) -> Any:
        assert self._shell is not None
        return self._shell(**inputs)

    @contextmanager
    def _evaluating(self, dataset: Any) -> Iterator[None]:
        """The pipeline is up inside, for evaluation or prediction, in training or without."""
        stage = self._stage
        if stage is None or stage.view.model is not self.model:
            dataset = self.eval_dataset if dataset is None else dataset
            dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
            stage = self._start(next(iter(dataset.values())) if isinstance(dataset, dict) else dataset, False)
        if stage.view.is_installed:
            yield
            return
        stage.store.move(stage.own_names(), self.args.device)
        with stage.active():
            yield
        if stage.groups.num_stages > 1:
            stage.store.move(stage.own_names(), torch.device("cpu"))

    @contextmanager
    def _reporting_faults(self) -> Iterator[None]:
        """An error inside ends the run on every rank, with the first cause named."""
        self._guard_depth += 1
        try:
            yield
        except BaseException as error:
            if self._guard_depth == 1 and not isinstance(error, (SystemExit, GeneratorExit)):
                self._report_fault(error)
            raise
        finally:
            self._guard_depth -= 1

    def _report_fault(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
        second_hand = is_second_hand(error)
        cause = self._faults.report(text, is_first_hand=not second_hand)
        self.events.write("fault", self.state.global_step, self.state.epoch, cause=cause)
        if second_hand:
            raise PipelineError(f"The run ended on rank {self.topology.rank}. First cause: {cause}") from error

    # ---- training ----

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as `Trainer.train` does; afterwards `trainer.model` is whole on every rank.

        Raises:
            ValueError: asked to resume, or something that cannot work with a pipeline.
            PipelineError: another rank failed; the text names the first cause.
        """
        check_resume(resume_from_checkpoint)
        with self._reporting_faults():
            return super().train(None, trial, ignore_keys_for_eval)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a trial would have to start and stop on all ranks of a pipeline together."""
        raise ValueError(
            "hyperparameter_search is not supported with a pipeline: start one run per setting, or use Trainer."
        )

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        stage = self._start(self.train_dataset, is_training=True)
        self._announce_start()
        self._separate_random_streams(stage)
        with stage.active():
            return super()._inner_training_loop(*args, **kwargs)

    def _announce_start(self) -> None:
        assert self._stage is not None and self._start_up is not None
        layout = self._stage.layout
        fields = self._start_up.describe(layout)
        self.events.write("run", 0, 0.0, layout=layout.as_event(), **fields)
        if self.is_world_process_zero():
            announce(f"PipeTransformer: {layout}, {layout.schedule}. {fields['expectation']}")

    def _separate_random_streams(self, stage: Stage) -> None:
        """Stages and replicas draw different dropout masks; one process draws what Trainer draws."""
        self._random_state = torch.get_rng_state()
        if self.topology.world_size > 1:
            place = stage.groups.replica * stage.groups.num_stages + stage.groups.stage
            torch.manual_seed(self.args.seed + 1_000_003 * (1 + place) + 7_919 * self._num_starts)
        self._num_starts += 1

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Trainer's optimizer over what this stage owns; a shared parameter's state is kept by its first user."""
        if self._stage is None or self.optimizer is not None:
            return super().create_optimizer(model)
        secondary = self._stage.secondary()
        for parameter in secondary:
            parameter.requires_grad_(False)
        optimizer = super().create_optimizer(model)
        for parameter in secondary:
            parameter.requires_grad_(True)
        optimizer.register_step_post_hook(self._after_optimizer_step)
        return optimizer

    def _after_optimizer_step(self, *_args: Any) -> None:
        if self._stage is not None:
            share_values(self._stage.shared)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> PipelineShell:
        assert self._shell is not None
        return self._shell

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        assert self._stage is not None
        if not isinstance(train_dataloader, PipelineLoader) and self.topology.world_size > 1:
            raise ValueError(
                f"get_train_dataloader returned a {type(train_dataloader).__name__}, which knows nothing of stages. "
                "Build it with self._get_dataloader, or override _get_train_sampler or the data collator instead."
            )
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Fetch the batches of one optimizer step and count, over all replicas, what their losses average over."""
        assert self._runner is not None
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        counts = self._runner.over_replicas([self._count_items(batch) for batch in batches])
        self._batch_items = deque(counts)
        # An empty batch of this replica says nothing of labels; the probe did.
        passes = self._has_labels and (self.model_accepts_loss_kwargs or self.compute_loss_func is not None)
        return batches, torch.tensor(float(sum(counts)), device=device) if passes else None

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward, backward and, at the end of an accumulation, reduction of one loader batch.

        Returns:
            A scalar whose mean over all ranks is the batch's loss.
        """
        assert self._runner is not None and self._stage is not None
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        if self.args.torch_empty_cache_steps and self.state.global_step % self.args.torch_empty_cache_steps == 0:
            clear_device_cache()

        def forward(micro_batch: dict[str, Any]) -> torch.Tensor:
            with self.compute_loss_context_manager():
                loss: torch.Tensor = self.compute_loss(model, micro_batch, num_items_in_batch=num_items_in_batch)
            return loss

        accumulation = 1.0 if self._is_scaled(num_items_in_batch) else 1.0 / self.current_gradient_accumulation_steps
        scaler = self.accelerator.scaler
        loss_scale = accumulation * (scaler.get_scale() if scaler is not None else 1.0)
        loss = self._runner.train(
            inputs,
            self._prepare_inputs,
            forward,
            self._batch_items.popleft(),
            loss_scale,
            self.accelerator.sync_gradients,
        )
        return loss.detach().to(self.args.device) * (accumulation * self.topology.world_size)

    def _is_scaled(self, num_items_in_batch: Any) -> bool:
        """Trainer's rule for a loss that is already divided over the accumulation."""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        uses_items = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return uses_items or self.compute_loss_func is not None

    def get_tp_size(self) -> int:
        """Trainer multiplies losses by the ranks that do not share a batch, to undo a mean; this trainer sums."""
        return self.args.world_size

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of one optimizer step, the same for every layout."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def _count_items(self, inputs: Any) -> int:
        return count_items(inputs, self._loss_shifts_labels) if inputs else 0

    def _passes_num_items(self, inputs: Any) -> bool:
        return "labels" in inputs and (self.model_accepts_loss_kwargs or self.compute_loss_func is not None)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> torch.Tensor | None:
        # Called by Trainer's `prediction_step`; training counts over all replicas in `get_batch_samples`.
        if not any(self._passes_num_items(batch) for batch in batch_samples):
            return None
        return torch.tensor(float(sum(self._count_items(batch) for batch in batch_samples)), device=device)

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        norm = self._global_grad_norm()
        assert self._runner is not None
        clip_grads_with_norm_(self._runner.parameters_with_gradient(), self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._global_grad_norm() if grad_norm is None else grad_norm

    def _global_grad_norm(self) -> torch.Tensor:
        assert self._runner is not None
        if self.accelerator.scaler is not None:
            optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
            agree_on_overflow(self.accelerator.scaler, optimizer, self.args.device, self.topology.largest)
        return self._runner.grad_norm()

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
        make_whole(self._stage)
        self._stage.view.remove()
        if self.topology.world_size > 1 and self._random_state is not None:
            torch.set_rng_state(self._random_state)
        output: TrainOutput = super()._finalize_training(*args, **kwargs)
        self.events.write("end", self.state.global_step, self.state.epoch, train_loss=output.training_loss)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's log; the first training entry under a layout shows the layout as scalars."""
        if "loss" in logs and self.layout is not None and self.layout is not self._logged_layout:
            self._logged_layout = self.layout
            logs.update(self.layout.as_scalars())
        super().log(logs, start_time)

    # ---- evaluation and prediction ----

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as `Trainer.evaluate` does, through the pipeline; every rank gets the same metrics."""
        with self._reporting_faults(), self._evaluating(eval_dataset):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict as `Trainer.predict` does, through the pipeline; every rank gets all predictions in order."""
        with self._reporting_faults(), self._evaluating(test_dataset):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        assert self._stage is not None
        if not isinstance(dataloader, PipelineLoader):
            raise ValueError(
                f"get_eval_dataloader or get_test_dataloader returned a {type(dataloader).__name__}, which knows "
                "nothing of stages. Build it with self._get_dataloader, or override _get_eval_sampler instead."
            )
        outer = self._eval_gather
        self._eval_gather = ReplicaGather(self._stage.groups, dataloader)
        self.gather_function = self._eval_gather
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self._eval_gather = outer

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """One evaluation batch: the loss is that of the global batch, one entry for each of this replica's samples."""
        assert self._eval_gather is not None
        assert self._runner is not None
        num_items, num_samples = self._count_items(inputs), batch_size(inputs)
        is_plain = type(self).compute_loss is Trainer.compute_loss and self.label_smoother is None
        has_loss = all(inputs.get(name) is not None for name in self.label_names)
        self._runner.sends_loss_only = (
            prediction_loss_only and has_loss and is_plain and self.compute_loss_func is None
        )
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None:
            loss = self._eval_gather.mean(loss, num_items).expand(num_samples)
        return loss, logits, labels

    # ---- data ----

    def _dataset_and_collator(self, dataset: Any, description: str) -> tuple[Any, Any]:
        """The data set without the columns that the model does not take, and a collator that drops the rest."""
        if isinstance(dataset, datasets.Dataset):
            return self._remove_unused_columns(dataset, description=description), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator, description=description)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> PipelineLoader:
        check_dataset(dataset, description.lower())
        stage = self._stage if self._stage is not None else self._start(dataset, is_training=False)
        assert self._start_up is not None
        dataset, collate = self._dataset_and_collator(dataset, description)
        shows_inputs = "inputs" in self.args.include_for_metrics
        loader = make_pipeline_loader(
            dataset=dataset,
            collate=collate,
            sampler=sampler_fn(dataset) if sampler_fn is not None else None,
            global_batch_size=batch_size * self.topology.world_size,
            args=self.args,
            groups=stage.groups,
            placeholders=frozenset() if shows_inputs else self._start_up.probe.placeholders,
            is_training=is_training,
            common_length=self._start_up.common_length,
        )
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            self._eval_dataloaders = {**getattr(self, "_eval_dataloaders", {}), dataloader_key: loader}
        return loader

    # ---- saving ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a normal checkpoint for `from_pretrained`, whole, by rank 0. Call it on every rank."""
        stage = self._stage
        is_spread = stage is not None and stage.reducer is not None
        with self._reporting_faults(), whole_on_first_rank(stage) if is_spread and stage else nullcontext():
            super().save_model(output_dir, _internal_call)
            if is_spread:
                self.topology.barrier()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.events.write("checkpoint", self.state.global_step, self.state.epoch, content="model")


@contextmanager
def _gathering_nothing(accelerator: Any) -> Iterator[None]:
    """`accelerator.gather` gives the own value back, for code that only some ranks run."""
    accelerator.gather = lambda value: value
    try:
        yield
    finally:
        del accelerator.gather


def _comparable(args: PipeTransformerArguments) -> dict[str, Any]:
    """The arguments that must be equal on all ranks."""
    local = ("output_dir", "run_name", "disable_tqdm", "log_level", "log_level_replica", "hub_token", "local_rank")
    return {key: str(value) for key, value in args.to_dict().items() if key not in local}
