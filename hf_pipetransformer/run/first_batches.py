"""The batches that a run begins with, looked at before it starts: the run finds all random numbers as they were."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import Trainer

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.draws import SharedDraws, generators_kept, present_states
from hf_pipetransformer.autodp.reading import order_of_run
from hf_pipetransformer.autodp.stream import is_stream
from hf_pipetransformer.run import host
from hf_pipetransformer.run.loaders import Request
from hf_pipetransformer.samples import NUM_PROBE_SAMPLES, FirstBatches, OwnBatches, UsersBatch


def most_samples(args: PipeTransformerArguments) -> int:
    """How many samples the whole model may be run with, in full precision: a step of the run takes more memory."""
    if args.pipeline_checkpoint != "never" or args.activation_checkpointing:
        return 1
    size = args.train_samples_per_device
    return max(1, min(NUM_PROBE_SAMPLES, size // 2 if args.bf16 or args.fp16 else size))


def first_batches(trainer: Trainer, given: Request | Any) -> FirstBatches:
    """Those of a loader. A collective call; it draws from the global generators.

    Args:
        trainer: of the options, the columns and the collator.
        given: what Trainer's loader was asked for, or a loader of the user's own.
    """
    if not isinstance(given, Request):
        return UsersBatch(_first_of(given))
    dataset, collate = host.dataset_and_collator(trainer, given.dataset, given.description)
    size = trainer.args.global_batch_size(given.batch_size) // trainer.args.world_size
    if is_stream(dataset):
        return OwnBatches(dataset, collate, size)
    sampler = given.sampler(dataset)
    order = partial(order_of_run, dataset, sampler, trainer.args, SharedDraws(present_states()))
    return OwnBatches(dataset, collate, size, order, sampler)


def _first_of(loader: Any) -> dict[str, Any]:
    """The first batch of a user's loader. Each rank reads its own, as the ranks may do it together."""
    if iter(loader) is iter(loader):
        raise ValueError(
            f"The {type(loader).__name__} can be iterated once only, and a run looks at its first batch before it "
            "starts. Let `__iter__` begin anew each time."
        )
    with generators_kept(loader):
        batch = next(iter(loader), None)
    if batch is None:
        raise ValueError(f"The {type(loader).__name__} is empty: expected at least one batch.")
    getattr(loader, "end", lambda: None)()  # What accelerate made believes that it is still being read.
    return dict(batch)
