"""Evaluation and prediction through the pipeline, with one copy of every sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device

from hf_pipetransformer.comm.topology import check_agreement
from hf_pipetransformer.comm.transfers import all_gather_trees, digest_of
from hf_pipetransformer.compat import trainer_compat, trl_compat
from hf_pipetransformer.data.batches import batch_size, has_samples, take_samples
from hf_pipetransformer.data.effects import modes_kept
from hf_pipetransformer.data.loader import PipelineLoader, Request, request_of
from hf_pipetransformer.data.node_shares import replica_slice
from hf_pipetransformer.data.reading import is_stream
from hf_pipetransformer.data.rng import drawing_alike
from hf_pipetransformer.report import progress_bar
from hf_pipetransformer.runtime.generation import join_tokens, settings_of
from hf_pipetransformer.splitters.adapters import bare_model
from hf_pipetransformer.training.callbacks import running_callbacks
from hf_pipetransformer.training.evaluation import Evaluation, UsersEvaluation, own_step
from hf_pipetransformer.training.loaders import check_undivided, with_shared_rng


if TYPE_CHECKING:
    from hf_pipetransformer.runtime.pipeline import Pipeline
    from hf_pipetransformer.training.pipeline_session import PipelineSession


@contextmanager
def _installed(pipeline: Pipeline) -> Iterator[None]:
    """Install the stage for evaluation or prediction, unless a training has done so."""
    stage = pipeline.stage
    if stage.view.is_installed:
        yield
        return
    if stage.groups.pipeline_size == 1:
        stage.store.move(stage.own_names(), pipeline.settings.device)
    with stage.store.lent_to(pipeline.settings.device, stage.own_names()), stage.active():
        yield


class Evaluations:
    """Calls of `evaluate()` and `predict()`, which may start a pipeline and may come inside a training."""

    def __init__(self, run: PipelineSession) -> None:
        self.run = run
        self._is_metrics_only = False
        """True if nobody reads more than the metrics of the next loop."""

    @contextmanager
    def call(self, dataset: Any, method: str, is_metrics_only: bool = False) -> Iterator[None]:
        """Wrap an evaluation of `dataset`: a data set, its name in `eval_dataset`, or a dict of several.

        Args:
            method: name of the trainer's method that makes the loader. If the user overrides it (possible with one
                stage only) or overrides `evaluate`, the data set is not known yet, and the start waits for the loader.
            is_metrics_only: True if predictions are dropped once the metrics are computed.
        """
        trainer = self.run.context.trainer
        self.check_between_steps("An evaluation")
        makes_loader = self.run.num_stages == 1 and trainer_compat.is_overridden(trainer, method)
        awaits_loader = makes_loader or trainer_compat.is_overridden(trainer, "evaluate")
        # Calls nest: a callback or `compute_metrics` may evaluate or predict inside of an evaluation.
        kind = trainer_compat.with_attributes(self, {"_is_metrics_only": is_metrics_only})
        with kind, self._up(None if awaits_loader else self._request(dataset)):
            yield

    def check_between_steps(self, name: str) -> None:
        """See `Pipeline.check_between_steps`."""
        if self.run.in_force is not None:
            self.run.in_force.check_between_steps(name)

    def generate(self, inputs: Any, options: dict[str, Any]) -> Any:
        """See `PipeTransformerMixin.generate`."""
        context, left = self.run.context, self.run.session.is_left_to_trainer
        self.check_between_steps("generate()")
        topology, model, device = context.topology, context.trainer.model, context.args.device
        given = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
        # A mask may be a keyword argument: what has a row for each prompt is cut with them.
        size, tensors = (
            batch_size(given),
            {n: value for n, value in options.items() if isinstance(value, torch.Tensor)},
        )
        given |= {name: value for name, value in tensors.items() if value.dim() > 1 and has_samples(value, size)}
        options = {name: value for name, value in options.items() if name not in given}
        # Replicas share the rows and stages pass them on: unequal inputs would give mixed answers without an error.
        digests = {name: digest_of(value) for name, value in given.items() if isinstance(value, torch.Tensor)}
        check_agreement(topology, "inputs of generate()", digests)
        settings = settings_of(bare_model(model), {**given, **options})
        with nullcontext(False) if left else self._up(given) as is_up:
            model.eval()
            given = send_to_device(given, device)
            groups = self.run.pipeline.stage.groups if is_up else None
            # One process draws random numbers for all rows in turn, and returns one list of scores.
            is_undivided = settings.do_sample or settings.return_dict_in_generate
            if groups is None or groups.num_replicas == 1 or is_undivided:
                with drawing_alike(topology.broadcast, device) if settings.do_sample else nullcontext():
                    return model.generate(**given, **options)
            own = replica_slice(batch_size(given), groups.replica, groups.num_replicas)
            # A replica without rows comes to the gather all the same, for which the others wait.
            tokens = torch.empty(0, 0, dtype=torch.long)
            if own.stop > own.start:
                tokens = model.generate(**take_samples(given, own), **options)
            parts = all_gather_trees(tokens, groups.replica_control, groups.num_replicas)
        return join_tokens(parts, settings).to(device)

    def _take_first_rank_only(self) -> bool:
        """Decide where the next loop's metrics are computed; the one after it, in a callback say, is for all ranks."""
        context, (is_wanted, self._is_metrics_only) = self.run.context, (self._is_metrics_only, False)
        return (
            is_wanted
            and context.topology.world_size > 1
            and context.args.pipeline_compute_metrics == "first_rank"
            and context.trainer.compute_metrics is not None
            # A loop of the user's may read predictions on every rank.
            and not trainer_compat.is_overridden(context.trainer, "evaluation_loop")
        )

    def _request(self, dataset: Any) -> Request:
        """Return the request that Trainer will make; for a dict of data sets, the one for the first."""
        trainer = self.run.context.trainer
        dataset = trainer.eval_dataset if dataset is None else dataset
        dataset = trainer.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        first = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
        return Request(first, "Evaluation", trainer.args.eval_batch_size, trainer_compat.eval_sampler(trainer))

    @contextmanager
    def _up(self, request: Any) -> Iterator[bool]:
        """Wrap an evaluation; yields False without a pipeline, which can start only for a known request.

        `request` is what `PipelineSession.inspect` takes, or None.
        """
        run = self.run
        with run.context.timeouts.reporting_faults():
            if not run.is_started(request):
                yield False
                return
            # Stages of an asynchronous training may be some steps apart, and an evaluation needs the weights of one.
            run.pipeline.settle()
            with running_callbacks(run.context.trainer, run.pipeline), _installed(run.pipeline):
                yield True

    def reference_of(self, dataset: Any, samples_per_rank: int) -> Any:
        """Return a data set with what a frozen reference says of its samples; None without a pipeline.

        Collective: call on every rank. The reference is the model as it is now, without its adapters.
        """
        run, trainer = self.run, self.run.context.trainer
        if is_stream(dataset):
            return None
        # All samples: each needs a value in the columns that are added.
        request = Request(dataset, "Reference", samples_per_rank, reads_all=True)
        with self._up(request) as is_up, modes_kept(trainer.model.modules()):
            if not is_up:
                return None
            evaluation = Evaluation(run.context, run.pipeline, run.loader_of(request))
            is_shown = run.context.topology.rank == 0 and not trainer.args.disable_tqdm
            entries = []
            trainer.model.eval()
            with progress_bar("Computing what the reference says", len(evaluation.loader), is_shown) as bar:
                for batch in evaluation.loader:
                    entries.append(evaluation.gathered_reference(batch))
                    bar.update(1)
        return trl_compat.with_columns(dataset, entries)

    @contextmanager
    def loop(self, given: Any) -> Iterator[Evaluation | UsersEvaluation]:
        """Wrap Trainer's evaluation loop; the yielded evaluation names the loader, the pipeline's or the user's."""
        run, trainer, request = self.run, self.run.context.trainer, request_of(given)
        cache = run.cache
        is_users = request is None and not isinstance(given, PipelineLoader)
        if is_users:
            check_undivided(given, "get_eval_dataloader or get_test_dataloader", run.num_stages)
        alone = run.session.evaluates_alone
        is_for_first_rank = self._take_first_rank_only()
        try:
            # Entered here as well: a user's own `evaluate` may call the loop directly.
            with self._up(request) as is_up:
                if is_users or not is_up:
                    shared = run.pipeline.shared_rng if is_up else None
                    run.session.evaluates_alone = alone or not is_up
                    with trainer_compat.with_attributes(trainer, {"prediction_step": own_step(trainer)}):
                        yield UsersEvaluation(with_shared_rng(given, shared))
                    return
                loader = given if request is None else run.loader_of(request)
                evaluation = Evaluation(run.context, run.pipeline, loader, is_for_first_rank)
                storing = nullcontext() if cache is None else cache.storing_for(loader)
                with evaluation.in_trainers_loop(), storing:
                    yield evaluation
        finally:
            if is_users:
                run.session.evaluates_alone = alone
