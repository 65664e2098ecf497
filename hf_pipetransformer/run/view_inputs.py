"""Whether samples are random, so that views of them are stored, and how they are read then."""

from __future__ import annotations

from typing import Any

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autocache.inputs import examine_inputs
from hf_pipetransformer.autodp.seeding import (
    PlainRows,
    SeededCollator,
    SeededGenerators,
    SeededReading,
    SeededSamples,
)
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.autodp.views import ItemCode, Views
from hf_pipetransformer.report.events import announce, logger
from hf_pipetransformer.startup import StartUp


_SAMPLES, _BATCHES = "samples", "batches"


def seeded_reading(
    args: PipeTransformerArguments, topology: Topology, start_up: StartUp, dataset: Any, collate: Any
) -> SeededReading | None:
    """How training samples are read of which views are stored; None if there is nothing random in them.

    None also where the cache could not tell one draw from another. A collective call.
    """
    num_views, seed = args.activation_cache_views, args.data_seed if args.data_seed is not None else args.seed
    code = ItemCode(max(1, len(dataset)), num_views)
    samples = SeededSamples(dataset, code, SeededGenerators([dataset], seed))
    found, reason = topology.decide(lambda: list(_what_draws(samples, collate, start_up)))
    if topology.rank == 0:
        _tell(found, reason, num_views)
    if found is None:
        return None
    of_batch: SeededCollator | PlainRows = PlainRows(collate)
    if found == _BATCHES:
        main_input = start_up.probe.activation.main_input
        generators = SeededGenerators([collate], seed)
        of_batch = SeededCollator(collate, code, generators, main_input, start_up.pad_token_id)
    return SeededReading(samples, of_batch, Views(code, seed))


def _what_draws(samples: SeededSamples, collate: Any, start_up: StartUp) -> tuple[str | None, str | None]:
    """Who draws what the model sees: the data set alone, or its collator too; else why views are of no use."""
    names = start_up.probe.activation.main_input, start_up.probe.placeholders
    report = examine_inputs(samples.dataset, collate, *names)
    if not report.is_random:
        return None, None if report.reason else "samples are the same each time they are read, one row of each does"
    # With the samples of one draw only the collator can change anything. One that mixes them shows it here.
    report = examine_inputs(samples, PlainRows(collate), *names)
    if report.reason is None:
        return _SAMPLES, None
    return (_BATCHES, None) if report.is_random else (None, report.reason)


def _tell(found: str | None, reason: str | None, num_views: int) -> None:
    if reason is not None:
        logger.warning(f"activation_cache_views={num_views} has no use: {reason}")
    if found is not None:
        what = "Random augmentation" if found == _SAMPLES else "A collator that draws at random"
        views = "one view" if num_views == 1 else f"up to {num_views} views"
        announce(
            f"{what} found: of each sample {views} will be stored as soon as layers are cached, and taken in turn. "
            "Each draw is seeded by seed, sample and epoch."
        )
