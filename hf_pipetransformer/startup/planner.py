"""Choice of a run's first layout on rank 0, inputs of later plans, and the start-up line that explains them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from transformers.training_args import OptimizerNames

from hf_pipetransformer.engine.losses import LossRule, LossScope
from hf_pipetransformer.planning.blocks import BlockCosts
from hf_pipetransformer.planning.costs import Overheads
from hf_pipetransformer.planning.layouts import (
    PlanInputs,
    choose_num_chunks,
    choose_num_microbatches,
    largest_rank_size,
)
from hf_pipetransformer.planning.memory import MEMORY_RESERVE, MemoryRules, sum_bytes
from hf_pipetransformer.planning.search import first_layout
from hf_pipetransformer.planning.simulator import equal_durations, simulate
from hf_pipetransformer.planning.token_slices import WORTH, SlicePlanner
from hf_pipetransformer.report import duration
from hf_pipetransformer.schedules.abilities import FORWARDS_FIRST, abilities_of
from hf_pipetransformer.schedules.layout import Layout, counted
from hf_pipetransformer.schedules.placement import slice_bounds
from hf_pipetransformer.schedules.tables import find_schedule
from hf_pipetransformer.schedules.weight_kinds import weights_under
from hf_pipetransformer.startup.model import has_dropout


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import Topology
    from hf_pipetransformer.data.batches import CommonLength, SampleBatch
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.splitters.base import Splitter
    from hf_pipetransformer.splitters.structure import Probe


_MEANING = {
    "pipeoptim": "a forward sees the weights predicted for its backward, a backward the current ones",
    "vanilla": "forwards and backwards see the current weights",
    "stashing": "a backward sees the weights that its forward saw",
    "double_buffer": "forwards and backwards of a step see the weights before the last update",
    "spectrain": "forwards and backwards see predicted weights",
    "xpipe": "forwards and backwards see weights predicted as Adam does",
}
"""Description of each value of `pipeline_weights`, for the start-up line."""


def replacing_schedule(args: PipeTransformerArguments, scope: LossScope) -> str | None:
    """Name the schedule that runs in place of the one asked for, where a loss sees more than parts; None if none."""
    is_asked = scope is LossScope.PARTS or args.is_undivided or not args.abilities.runs_steps_whole
    return None if is_asked or args.pipeline_schedule == FORWARDS_FIRST else FORWARDS_FIRST


def samples_per_microbatch(args: PipeTransformerArguments) -> int:
    """Return the size of the first layout's largest micro-batch; if the number of stages K is open, that of K=1."""
    size = args.pipeline_size or 1
    samples = args.train_samples_per_device * size
    rule = weights_under(args.abilities, args.pipeline_weights), args.gradient_accumulation_steps
    return -(-samples // (args.num_microbatches or choose_num_microbatches(size, samples, *rule)))


@dataclass(frozen=True)
class MeasuredCosts:
    """Measured costs that plans start from; blocks were measured with a micro-batch of `num_samples`."""

    blocks: BlockCosts
    overheads: Overheads
    num_samples: int


@dataclass(frozen=True)
class RunPlanner:
    """Planner of layouts from measured costs; rank 0 chooses and broadcasts.

    Args:
        device_bytes: memory of the smallest device, in bytes.
        num_frozen_by_user: number of leading layers that the script froze.
        unfit: largest pipeline length that ran out of memory under the same conditions; new pipelines are longer.
        num_probed: number of samples in the batch that `probe.block_flops` refers to.
        sums: if gradients of half-precision weights are added in float32, once a training has begun; None before.
        dropout_from: see `model.dropout_from`.
        scope: samples that one call of the loss sees.
        replaced_by: name of the schedule that runs in place of the one asked for; None if that one runs.
        why_whole_head: reason why the head may not run in slices of the sequence; None if it may.
        head_slices: slices of the head, as asked for or chosen.
        num_passes: how often the run comes to the same samples.
    """

    args: PipeTransformerArguments
    topology: Topology
    probe: Probe
    costs: MeasuredCosts
    device_bytes: float
    num_frozen_by_user: int
    has_dropout: bool
    unfit: int
    num_probed: int = 1
    sums: bool | None = None
    dropout_from: float = math.inf
    scope: LossScope = LossScope.PARTS
    replaced_by: str | None = None
    why_whole_head: str | None = None
    head_slices: int = 1
    num_passes: float = 1.0

    @cached_property
    def read_share(self) -> float:
        """Share of the embeddings' forward in frozen encoders of media, if what they give is read in most of the run.

        Before the first steps `auto` is taken to store it: else it takes less time than reading, or seconds in all.
        """
        media, share, mode = self.probe.structure.media, self.probe.media_share, self.args.activation_cache
        if media is None or self.num_passes <= 1 or mode == "off" or "activation_cache" in self.args.abilities.refuses:
            return 0.0
        if mode == "auto" and any(map(has_dropout, media.frozen.values())):
            return 0.0
        # Words that are looked up are no products, and to read is not free.
        return min(0.99, share)

    @cached_property
    def blocks(self) -> BlockCosts:
        """Costs of the blocks, of frozen encoders without the time in which these compute what is to be read.

        Their memory stays: the first of several epochs computes.
        """
        blocks, computed = self.costs.blocks, 1 - self.read_share
        seconds, launches = computed * blocks.forward[0], blocks.launch
        if launches:
            launches = (computed * launches[0][0], launches[0][1]), *launches[1:]
        return replace(blocks, forward=(seconds, *blocks.forward[1:]), launch=launches)

    def trying(self, layout: Layout) -> dict[str, Any]:
        """Return the fields that an out-of-memory event under `layout` records for `read_unfit`."""
        return {"layout": layout.as_event(), "conditions": self.conditions}

    @property
    def conditions(self) -> dict[str, Any]:
        """Everything except the layout that a rank's memory depends on, as JSON values."""
        args, slices = self.args, self.num_head_slices
        names = (
            "per_device_train_batch_size", "per_device_eval_batch_size", "bf16", "fp16", "pipeline_checkpoint",
            "pipeline_master_dtype", "optim",
        )  # fmt: skip
        return {
            **{name: str(getattr(args, name)) for name in names},
            "num_microbatches": args.num_microbatches,
            "schedule": self.schedule,
            "num_chunks": self.wanted_chunks,
            # Left out where they change nothing: conditions of runs without the option stay equal.
            **({"head_slices": slices} if slices > 1 else {}),
            **({"weights": args.pipeline_weights} if "pipeline_weights" in args.abilities.reads else {}),
            "num_layers": self.probe.structure.num_layers,
            "device_bytes": self.device_bytes,
        }

    @property
    def schedule(self) -> str:
        """Name of the schedule that runs."""
        return self.replaced_by or self.args.pipeline_schedule

    @property
    def wanted_chunks(self) -> int:
        """Number of stages on each rank V, if the pipeline has several ranks and the model the length."""
        # Only the schedule that was asked for may have the chunks that were asked for.
        asked = self.args.num_chunks
        return asked if self.replaced_by is None else abilities_of(self.replaced_by).default_chunks

    @property
    def num_head_slices(self) -> int:
        """Slices of the head under the schedule that runs."""
        # A plan compares schedules, of which some cannot slice.
        return self.head_slices if self.args.abilities.runs_steps_whole else 1

    @property
    def measures_microbatches(self) -> bool:
        """True if the number of micro-batches M is tuned on training steps; "auto" needs M to change rounding only."""
        asked = self.args.pipeline_parallel_num_microbatches
        if not self.args.abilities.runs_steps_whole or self.probe.structure.media is not None:
            # M is planned together with the slices, there is no bubble to shrink, or batches are collated in M parts.
            return False
        return asked == "measured" or (asked == "auto" and self._is_free)

    @property
    def memory_rules(self) -> MemoryRules:
        """Rules of the optimizer, recomputation and precision that memory depends on."""
        args, casts = self.args, bool(self.args.bf16 or self.args.fp16)
        optim = OptimizerNames(args.optim).value
        scope, slices = self.scope.value, self.num_head_slices
        return MemoryRules(optim, args.pipeline_checkpoint, casts, loss_sees=scope, head_slices=slices)

    def sums_in_float32(self, layout: Layout) -> bool:
        """Return True if a run that begins with `layout` adds the gradients of half-precision weights in float32."""
        if self.sums is not None:
            return self.sums
        asked = self.args.pipeline_gradient_dtype
        if asked != "auto":
            return asked == "float32"
        fits = self.needed_bytes(layout, sums=True) <= self.device_bytes * (1 - MEMORY_RESERVE)
        return any(sum_bytes(self.costs.blocks)) and fits

    def needed_bytes(self, layout: Layout, **rules: Any) -> float:
        """Return the bytes of a layout's fullest rank; `rules` override `memory_rules`."""
        inputs = self.inputs()
        return replace(inputs, memory_rules=replace(inputs.memory_rules, **rules)).needed_bytes(layout)

    @property
    def _is_free(self) -> bool:
        """True if measured times may choose between layouts, because layouts differ by rounding only."""
        return not (self.has_dropout or self.args.full_determinism)

    @property
    def _work(self) -> tuple[float, ...]:
        """Forward FLOPs per sample of each block if stage cuts change results; empty if measured times can be used.

        Cuts determine dropout masks and, in an asynchronous schedule, weight staleness: cuts chosen by measured times
        would make results irreproducible.
        """
        if self._is_free and self.args.abilities.is_exact:
            return ()
        counted = self.probe.block_flops
        if not any(counted):
            # `FlopCounterMode` counts matrix products only, and this model has none.
            return tuple(map(float, self.costs.blocks.parameters))
        computed = counted[0] * (1 - self.read_share), *counted[1:]
        return tuple(each / self.num_probed for each in computed)

    def inputs(
        self, began_under: Layout | None = None, known_microbatches: dict[tuple[int, int], int] | None = None
    ) -> PlanInputs:
        """Return the inputs of the plans of a run, of those after its first layout if it is given."""
        args, blocks, memory = self.args, self.blocks, self.memory_rules
        # The first layout has nothing to be compared with.
        largest, size = 0.0, 0
        if began_under is not None:
            largest, size = largest_rank_size(blocks.parameters, began_under), began_under.pipeline_size
            memory = replace(memory, sums=self.sums_in_float32(began_under))
        return PlanInputs(
            blocks,
            self.costs.overheads,
            args.train_samples_per_device,
            compression=args.pipeline_compression,
            cut_positions=tuple(self.probe.structure.cut_positions()),
            device_bytes=self.device_bytes,
            elastic=args.elastic,
            num_microbatches=args.num_microbatches,
            known_microbatches=known_microbatches or {},
            unfit=self.unfit,
            initial_largest_size=largest,
            initial_size=size,
            num_chunks=self.wanted_chunks,
            token_slices=args.token_slices,
            weights=args.pipeline_weights,
            memory_rules=memory,
            work=self._work,
            # Under async_1f1b K decides how stale weights are; with full_determinism no clock may decide.
            is_timeless=not args.abilities.is_exact or args.full_determinism,
            measures_microbatches=self.measures_microbatches,
            accumulation=args.gradient_accumulation_steps,
        )

    def layout(self, num_frozen: int = 0) -> Layout:
        """Return the first layout, chosen by rank 0. Collective: call on every rank.

        Args:
            num_frozen: number of layers that were already frozen when the run resumed.

        Raises:
            ValueError: on every rank, if the requested pipeline length is not possible.
        """
        num_frozen = max(num_frozen, self.num_frozen_by_user)

        def choose() -> dict[str, Any]:
            if self.args.pipeline_size is not None:
                self.topology.check_pipeline_size(self.args.pipeline_size)
            return self.choose(num_frozen).as_event()

        return Layout.from_event(self.topology.decide(choose))

    def choose(self, num_frozen: int) -> Layout:
        """Return the first layout. Pure."""
        if self.args.pipeline_size is not None:
            return self.plan(self.args.pipeline_size, num_frozen)
        possible = [k for k in self.topology.pipeline_sizes if self.num_chunks(k)]
        # A shorter pipeline has more on each rank, so that it runs out of memory as well.
        untried = [k for k in possible if k > self.unfit]
        # Where no length is left, the longest, which needs least on a rank, is tried again.
        return first_layout(untried or possible[-1:], lambda k: self.plan(k, num_frozen), self.fits)

    def fits(self, layout: Layout) -> bool:
        """Return True if a layout fits on the smallest device."""
        return self.inputs().fits(layout)

    def num_chunks(self, size: int) -> int:
        """Return the stages per rank V of a pipeline of `size` ranks; 0 if the model is too short for it."""
        most = len(self.probe.structure.cut_positions()) - 1
        return choose_num_chunks(self.schedule, self.wanted_chunks, size, most)

    def plan(self, size: int, num_frozen: int) -> Layout:
        """Return the first layout with `size` stages. Pure."""
        replicas, chunks = self.topology.world_size // size, self.num_chunks(size)
        return self.inputs().lay_out(self.schedule, size, replicas, chunks, num_frozen)

    def describe(self, layout: Layout, policy: str, freezes: bool, trainer_adds_up: bool = False) -> dict[str, Any]:
        """Return the event of the choice: the expectation printed at start-up, and the costs behind it.

        `trainer_adds_up`: see `StartUp`.
        """
        costs, inputs = self.costs, self.inputs()
        prediction, samples = inputs.predict(layout), inputs.samples(layout)
        # Only outputs of frozen layers are cached.
        may_cache = (freezes or layout.num_frozen_layers) and "activation_cache" not in layout.abilities.refuses
        cache = self.args.activation_cache if may_cache else "off"
        if cache != "off" and costs.overheads.spans_nodes(layout.pipeline_size):
            cache = "off while pipelines span nodes"
        cache = self.encoders_in_words(layout) or cache
        freezing = f"Freezing: {policy}."
        if policy == "none" and layout.num_frozen_layers > self.num_frozen_by_user:
            freezing = f"Nothing more freezes, {layout.num_frozen_layers} of {layout.num_layers} layers stay frozen."
        elif policy == "none":
            freezing = "Nothing freezes" + self._claim(layout, trainer_adds_up)
        # Weights of other steps are what makes one inexact.
        pace = self._bubble(layout) + self._rule(layout) if layout.abilities.is_exact else self._asynchrony(layout)
        pace += self._slices(layout, samples) + self._over_nodes(layout, samples)
        if layout.abilities.is_exact and not self.args.abilities.is_exact:
            pace += f" One stage waits for nobody: {layout.schedule} and its options change nothing."
        reference = ", with the pass of the reference" if costs.overheads.has_reference else ""
        return {
            "expectation": f"{freezing} Activation cache: {cache}. A step is expected "
            f"to take {duration(prediction.seconds)}{reference}.{pace}",
            "predicted_step_s": prediction.seconds,
            "stage_seconds": list(prediction.rank_seconds),
            "measured_samples": costs.num_samples,
            "block_costs": {key: list(value) for key, value in asdict(self.blocks).items() if key != "slices"},
            "slice_costs": None if costs.blocks.slices is None else asdict(costs.blocks.slices),
            "block_flops": list(self.probe.block_flops),
        }

    def encoders_in_words(self, layout: Layout) -> str:
        """Say how the plan counts what frozen encoders of media give; empty without any, or if nothing is stored."""
        if not self.probe.media_share or self.args.activation_cache == "off":
            return ""
        if "activation_cache" in layout.abilities.refuses:
            return ""
        taken = "read" if self.read_share else "computed"
        return f"{self.args.activation_cache}, for frozen encoders; stages are cut as if these were {taken}"

    def one_stage_in_words(self, layout: Layout) -> str:
        """Return a sentence on K=1 for a pipeline whose model would fit on one device; empty if it would not."""
        # Where a pipeline ran out of memory, one device would as well.
        if layout.pipeline_size == 1 or self.unfit:
            return ""
        alone = self.plan(1, layout.num_frozen_layers)
        if not self.fits(alone):
            return ""
        seconds = self.inputs().predict(alone).seconds
        return f" The model fits on one device: a step of K=1 x R={alone.num_replicas} would take {duration(seconds)}."

    def _claim(self, layout: Layout, trainer_adds_up: bool) -> str:
        """Return the end of a sentence: what gives the same results, if anything does."""
        if not layout.abilities.is_exact or (trainer_adds_up and self.args.gradient_accumulation_steps > 1):
            return "."
        return f": same results as Trainer{' on one process' if trainer_adds_up else ''}."

    def _bubble(self, layout: Layout) -> str:
        k, m = layout.pipeline_size, layout.num_microbatches
        if k == 1:
            return ""
        slices = max(map(len, layout.token_slices), default=1)
        # With equal stages: real cuts are never quite even, and so wait more.
        table = find_schedule(layout.schedule).table(k, m, layout.num_chunks, num_token_slices=slices)
        timeline = simulate(table, equal_durations(layout.places, num_token_slices=slices), layout.places)
        parts = counted(m, "micro-batch", "micro-batches") + ("" if slices == 1 else f" of {slices} token slices")
        return f" With {parts} the {k} devices are busy at most {1 - timeline.bubble:.0%} of the time."

    def _over_nodes(self, layout: Layout, samples: int) -> str:
        """Return a sentence on the messages of a pipeline that spans nodes; empty for others."""
        overheads = self.costs.overheads
        if not overheads.spans_nodes(layout.pipeline_size):
            return ""
        hops = overheads.hops(layout, self.costs.blocks, samples / layout.num_microbatches)
        far = max(hop for n, hop in enumerate(hops) if layout.places.leaves_node(n, overheads.node_size))
        return (
            f" Each pipeline spans {layout.pipeline_size // overheads.node_size} nodes: a message takes up to "
            f"{far * 1e3:.3g} ms between them, {overheads.hop * 1e3:.3g} ms inside one."
        )

    def _slices(self, layout: Layout, samples: int) -> str:
        costs, is_free = self.costs.blocks.slices, self.args.num_microbatches is None
        if costs is None or not self.args.abilities.cuts_tokens:
            return ""
        length, size = costs.length, layout.pipeline_size
        cut_in = [stop - start for start, stop in pairwise(slice_bounds(layout.token_slices, length))]
        if len(cut_in) > 1:
            return f" Sequences of {length} tokens run in slices of {_listed(cut_in)} tokens."
        if self.args.token_slices is not None:
            return f" Sequences of {length} tokens stay whole, as pipeline_token_slices says."
        said = f" pipeline_token_slices='auto' keeps sequences of {length} tokens whole: "
        if size == 1:
            return said + "one stage waits for no other."
        count = None if is_free else layout.num_microbatches
        hop = self.costs.overheads.slowest_hop(layout, self.costs.blocks, samples)
        planner = SlicePlanner(find_schedule(self.schedule), costs, samples, size, hop)
        whole, cut = planner.best_whole_and_cut(count)
        if cut is None:
            return said + "they are too short for slices, or any slice takes longer than the bubble that it fills."
        share = 100 * (cut.seconds / whole.seconds - 1)
        said += (
            f"slices of {_listed(cut.lengths)} tokens with M={cut.num_microbatches} would take {abs(share):.2g} % "
            f"{'less' if share < 0 else 'more'} time than the {whole.seconds:.3g} s a batch of whole ones with "
            f"M={whole.num_microbatches}"
        )
        return said + (f", and measured times err by {100 * (1 - WORTH):.0f} % or more." if share < 0 else ".")

    def _rule(self, layout: Layout) -> str:
        """Return a sentence on why M is not tuned; empty if it is tuned or could not be."""
        is_free = self.args.num_microbatches is None and not self.args.abilities.cuts_tokens
        if layout.pipeline_size == 1 or not is_free or self.measures_microbatches:
            return ""
        cause = "dropout masks depend on M" if self.has_dropout else "full_determinism"
        rule = f" M={layout.num_microbatches} by rule, since {cause}; "
        return rule + "pipeline_parallel_num_microbatches='measured' tries others."

    def _asynchrony(self, layout: Layout) -> str:
        k, m, kind = layout.pipeline_size, layout.num_microbatches, self.args.pipeline_weights
        # As many forwards as `steady_lag` counts, an update after each step's micro-batches.
        ahead = -(-(k - 1 - layout.first_active_stage) // (m * self.args.gradient_accumulation_steps))
        updates = f"{ahead} update{'' if ahead == 1 else 's'}"
        asked = self.args.pipeline_parallel_num_microbatches
        rule = f" M={m} by rule: no other number leaves less to wait for." if asked == "measured" else ""
        return (
            f" Asynchronous: no bubble between drains, for each of {k} stages updates itself. On the first trained "
            f"one {updates} at most lie between a forward and its backward; "
            f"with pipeline_weights={kind!r} {_MEANING[kind]}.{rule}"
        )


def _listed(lengths: Sequence[int]) -> str:
    return f"{', '.join(map(str, lengths[:-1]))} and {lengths[-1]}"


@dataclass(frozen=True)
class StartUp:
    """Findings about a model before its first step, the same on every rank.

    Args:
        padding: how batches are padded to a common length, but for the side, which the collator tells.
        pads_alike: True if replicas pad to one, as padding may change the loss.
        sees_padding: True if hidden states at masked positions may change the loss, so that stored records keep them.
        reads_first: True if all layers are frozen and the head reads the first position alone of what they give.
        shape_without_rows: of an output that evaluations of the run gather, with no row for each sample; None if all
            have one.
        trainer_adds_up: True if Trainer adds up the losses of a step's batches and processes, which are averaged here.
    """

    probe: Probe
    splitter: Splitter
    loss_rule: LossRule
    padding: CommonLength
    pads_alike: bool
    sees_padding: bool
    main_dtype: torch.dtype
    samples: SampleBatch
    plans: RunPlanner
    shape_without_rows: str | None = None
    trainer_adds_up: bool = False
    reads_first: bool = False

    @property
    def untried_media(self) -> frozenset[str]:
        """Names of media that the model takes and no sample of the first batch has; empty if one has some."""
        media = self.probe.structure.media
        return frozenset() if media is None or media.names & self.samples.names else media.names

    @property
    def record_length(self) -> int:
        """Positions in a record of the activation cache, of a sample without tokens or of the longest."""
        return 1 if self.reads_first else int(self.probe.activation.hidden_shape[0])


@dataclass(frozen=True)
class StartDecision:
    """Decision of a start, made once: nobody changes it, and later layouts are planned from it.

    There is none of a run that Trainer's own loop trains.

    Args:
        plans: planner with the schedule that runs, the samples that one call of the loss sees, the slices of the head
            and the precision of the sums of gradients.
        layout: stages, replicas and micro-batches that the run begins or goes on with.
        began_under: layout that the run began under, which may have had more stages.
        longest: largest number of stages K that it may come to have.
        replay: optimizer step to the layout from then on, of an earlier run; None lets the policy decide.
        freezes: True if layers may freeze in the run.
    """

    plans: RunPlanner
    layout: Layout
    began_under: Layout
    longest: int
    replay: Mapping[int, Layout] | None = None
    freezes: bool = False
    is_training: bool = True

    @property
    def stores(self) -> bool:
        """True if a layer is frozen or will be, so that what it gives may be stored."""
        return self.layout.num_frozen_layers > 0 or self.freezes
