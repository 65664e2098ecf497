"""Start-up inspection of a model (`inspect_model`): runs the checks and measurements, and makes all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from hf_pipetransformer.comm.errors import LossDoesNotDecomposeError, PipelineError
from hf_pipetransformer.comm.topology import Topology, check_agreement
from hf_pipetransformer.data.batches import CommonLength, SampleBatch
from hf_pipetransformer.data.effects import buffers_kept
from hf_pipetransformer.engine.head import HeadSlices
from hf_pipetransformer.engine.losses import LossScope
from hf_pipetransformer.planning.costs import Overheads
from hf_pipetransformer.planning.token_slices import TokenCosts
from hf_pipetransformer.report import progress_bar
from hf_pipetransformer.report.events import read_unfit
from hf_pipetransformer.splitters.base import UnsupportedModelError
from hf_pipetransformer.splitters.masters import master_names
from hf_pipetransformer.splitters.script_code import ScriptHooks
from hf_pipetransformer.startup.check import probe_model
from hf_pipetransformer.startup.costs import (
    BlockProfile,
    ReadBatch,
    affordable_sequences,
    block_costs,
    measure_blocks,
    smallest_device_bytes,
    with_batch,
)
from hf_pipetransformer.startup.model import (
    MOST_GRADIENTS,
    ProbeTarget,
    dropout_from,
    has_dropout,
    in_float32,
    in_full_precision,
    num_frozen_by_user,
    undisturbed,
    with_masters,
)
from hf_pipetransformer.startup.planner import (
    MeasuredCosts,
    RunPlanner,
    StartUp,
    replacing_schedule,
    samples_per_microbatch,
)
from hf_pipetransformer.startup.rows import why_across, why_mixed
from hf_pipetransformer.startup.slices import (
    MOST_SEQUENCES,
    NUMBERS,
    measure_slices,
    why_no_head_slices,
    why_unsliceable,
)
from hf_pipetransformer.startup.storable import (
    computes_otherwise_in_training,
    depends_on_length,
    depends_on_padding,
    reads_first_alone,
    why_one_after_another,
)
from hf_pipetransformer.startup.twin import as_twin, moved


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.splitters.structure import Probe


T = TypeVar("T")

_NOT_OF_THE_MODEL = (PipelineError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that do not speak against the model (another rank failed, out of memory, lost device): raised unchanged."""
_NUM_PARTS = 4
"""Calls of an `Inspection`, without those for token slices: places to cut, parts, padding, costs of the blocks."""
_OUT_OF_HOST_MEMORY = "DefaultCPUAllocator"


def inspect_model(
    given: ProbeTarget,
    args: PipeTransformerArguments,
    topology: Topology,
    is_training: bool,
    read: ReadBatch | None = None,
    events: str | None = None,
    num_passes: float = 1.0,
) -> StartUp:
    """Check on a tiny batch, in float32, that the model can be split, and measure its costs.

    Collective: call on every rank.

    Args:
        is_training: value of `model.training` during the checks.
        read: reads the batch that the blocks are measured with, called on rank 0 only; None measures the tiny batch.
        events: path of the event file of earlier runs in this output folder, for training; read on rank 0 only.
        num_passes: how often a training comes to the same samples.

    Raises:
        UnsupportedModelError: on every rank, if the split model computes other numbers or the model raises.
        LossDoesNotDecomposeError: batches of this model or collator cannot be cut.
        ValueError: the ranks' models differ, or token slices are requested and compute other numbers.
    """
    model = given.model
    is_shown = topology.rank == 0 and not args.disable_tqdm
    why_whole_head = given.why_whole_head
    tries_slices = is_training and args.head_slices != 1 and why_whole_head is None
    num_parts = _NUM_PARTS + 2 * args.abilities.cuts_tokens + tries_slices
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar("Inspecting the model", num_parts, is_shown))
        inspection = Inspection(topology, type(model).__name__, bar)
        read = None if read is None else inspection.reading(read)
        # The bar moves with each run of the model, since a single check of a large one takes minutes.
        given = replace(given, compute=inspection.showing_time(given.compute))
        # Before the move: only what the twin computes with goes to the device.
        twin = stack.enter_context(as_twin(model, given.splitter))
        stack.enter_context(_moved_to_probe(twin.tensors(model), args.device, topology))
        stack.enter_context(undisturbed(model, is_training))
        given = replace(given, hooks=stack.enter_context(ScriptHooks(model)))
        # Of forwards that write into them in evaluation mode, too.
        stack.enter_context(buffers_kept(model))
        if is_training and args.pipeline_master_dtype:
            stack.enter_context(with_masters(model, twin, given.inputs))
        target = with_batch(replace(given, twin=twin), given.inputs)
        # On every rank, since the structure refers to the rank's own modules. The answers of the checks below are
        # plain values, which rank 0 finds for all.
        probe, target = inspection.on_every_rank(lambda: _probed(target))
        _check_same_model(topology, model, probe)
        # Found by comparing bits, which may differ between kinds of devices: all ranks need one answer.
        probe = replace(probe, placeholders=frozenset(topology.decide(lambda: sorted(probe.placeholders))))
        # Before the checks stop the gradients of large parameters, which the script may train.
        frozen, drops_from = num_frozen_by_user(model, probe.structure), dropout_from(model, probe.structure)
        with in_full_precision(model, twin, target.inputs):
            exact = replace(target, inputs=in_float32(target.inputs))
            _check_cut(exact, probe, args, inspection, is_training)
            # Layers with dropout are known to compute otherwise in training: nothing has to be tried.
            is_tried = is_training and 0 < frozen < drops_from
            found = inspection.on_first_rank(lambda: _find_traits(exact, probe, args, topology, frozen, is_tried))
            if tries_slices:
                slices = HeadSlices(args.head_slices or NUMBERS[0], target.rule)
                why_whole_head = inspection.on_first_rank(lambda: why_no_head_slices(exact, probe.structure, slices))
                if why_whole_head is not None and args.head_slices is not None:
                    raise ValueError(
                        f"pipeline_head_slices={slices.number} changes the numbers of this model: {why_whole_head}."
                    )
            if args.abilities.cuts_tokens:
                why = inspection.on_first_rank(lambda: why_unsliceable(exact, probe.structure, target.rule))
                if why is not None:
                    raise ValueError(f"pipeline_schedule='token': {why}")
        # Outside of full precision, as costs are those of the run's own dtypes.
        costs = _measure_costs(target, probe, args, inspection, read)
    if args.pipeline_size != 1 and topology.world_size > 1:
        # A model that is cut waits on the host, from where each rank takes its own stage.
        model.to("cpu")
    device_bytes = smallest_device_bytes(args.device, topology)
    plans = RunPlanner(
        args,
        topology,
        probe,
        costs,
        device_bytes,
        frozen,
        has_dropout(model),
        unfit=0,
        num_probed=given.inputs.size,
        # What differs in training without a rate that names a layer counts from the first one on.
        dropout_from=1 if found["has_modes"] else drops_from,
        scope=target.scope,
        replaced_by=replacing_schedule(args, target.scope),
        why_whole_head=why_whole_head,
        head_slices=args.head_slices or 1,
        num_passes=num_passes,
    )
    return StartUp(
        probe=probe,
        splitter=target.splitter,
        loss_rule=target.rule,
        padding=CommonLength(target.main_input, target.pad_token_id),
        pads_alike=found["pads_alike"],
        sees_padding=found["sees_padding"],
        reads_first=found["reads_first"],
        shape_without_rows=found["shape_without_rows"],
        main_dtype=target.inputs[target.main_input].dtype,
        samples=target.inputs.mapped(torch.Tensor.cpu),
        # Other nodes may not have the file that rank 0 reads.
        plans=replace(plans, unfit=topology.decide(lambda: read_unfit(events, plans.conditions))),
    )


class Inspection:
    """Wrapper for calls that run the model: turns errors into `UnsupportedModelError`, the same on every rank.

    Each call is one step of the progress `bar`.
    """

    def __init__(self, topology: Topology, name: str, bar: Any) -> None:
        self.topology = topology
        self.bar = bar
        self._name = name
        self._of_data: Exception | None = None

    def reading(self, read: ReadBatch) -> ReadBatch:
        """Wrap `read` so that its errors are attributed to the data set and raised unchanged."""

        def noting_errors(num_samples: int) -> SampleBatch:
            try:
                return read(num_samples)
            except Exception as error:
                self._of_data = error
                raise

        return noting_errors

    def showing_time(self, compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap what runs the model so that the bar shows, within a long step too, that time passes."""

        def showing(*values: Any) -> torch.Tensor:
            self.bar.update(0)
            return compute(*values)

        return showing

    def on_every_rank(self, call: Callable[[], T]) -> T:
        """Call `call` on every rank and raise on all if it raises on one. Collective: call on every rank.

        Raises:
            UnsupportedModelError: the call raised on some rank; on that rank with the original error as the cause.
        """
        value, refusal = self._attempt(call)
        # A rank that raised before this collective would leave the others waiting in it.
        for text in self.topology.gather(None if refusal is None else str(refusal)):
            if text is not None:
                raise refusal or UnsupportedModelError(text)
        self.bar.update(1)
        return cast(T, value)

    def on_first_rank(self, call: Callable[[], Any]) -> Any:
        """Call `call` on rank 0 and return its result, JSON values, on every rank. Collective: call on every rank.

        Raises:
            UnsupportedModelError: on every rank, if the call raised; on rank 0 with the original error as the cause.
        """
        refusal: UnsupportedModelError | None = None

        def attempt() -> list[Any]:
            nonlocal refusal
            value, refusal = self._attempt(call)
            return [value, None if refusal is None else str(refusal)]

        # Only JSON values travel: the others raise the text, rank 0 the error itself with its cause.
        value, text = self.topology.decide(attempt)
        if text is not None:
            raise refusal or UnsupportedModelError(text)
        self.bar.update(1)
        return value

    def _attempt(self, call: Callable[[], T]) -> tuple[T | None, UnsupportedModelError | None]:
        try:
            return call(), None
        except UnsupportedModelError as error:
            return None, error
        except _NOT_OF_THE_MODEL:
            raise
        except Exception as error:
            # A full host raises a plain RuntimeError of torch's allocator, which says nothing of the model.
            if error is self._of_data or _OUT_OF_HOST_MEMORY in str(error):
                raise
            refusal = UnsupportedModelError(
                f"{self._name} raises {type(error).__name__} while it is tried on stages: {error}. This model cannot "
                "be pipelined as it is; pass `splitter=` with a Splitter that knows it, or use transformers.Trainer."
            )
            refusal.__cause__ = error
            return None, refusal


def _moved_to_probe(
    tensors: Sequence[torch.Tensor], device: torch.device, topology: Topology
) -> AbstractContextManager[None]:
    """Hold the twin on the ranks' devices inside if it fits on each with its gradients, else on the CPU."""
    fits = True
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Weights, their float32 copies, and the gradients of two runs that are compared.
        needed = sum(each.numel() * (each.element_size() + 4) for each in tensors) + 2 * 4 * MOST_GRADIENTS
        fits = needed < free / 2
    return moved(tensors, device if all(topology.gather(fits)) else torch.device("cpu"))


def _probed(target: ProbeTarget) -> tuple[Probe, ProbeTarget]:
    """Return what `probe_model` finds, and the target with which it does."""
    try:
        return probe_model(target), target
    except UnsupportedModelError:
        raise
    except Exception as error:
        if target.without_labels is None:
            raise
        other = replace(target, compute=target.without_labels)
        try:
            return probe_model(other), other
        except UnsupportedModelError:
            raise
        except Exception:
            raise error from None


def _check_same_model(topology: Topology, model: nn.Module, probe: Probe) -> None:
    """Check that all ranks have the same model; otherwise their transfers and collectives would not match."""
    facts: dict[str, Any] = {
        "places to cut": probe.structure.cut_positions(),
        "dtypes between the blocks": [str(dtype) for dtype in probe.boundary_dtypes],
        "shape between the blocks": list(probe.activation.hidden_shape),
        "multiple that lengths are padded to": probe.activation.multiple,
        "frozen layers": num_frozen_by_user(model, probe.structure),
        "dropout": has_dropout(model),
    }
    check_agreement(topology, "models", facts)


def _check_cut(
    exact: ProbeTarget, probe: Probe, args: PipeTransformerArguments, inspection: Inspection, is_training: bool
) -> None:
    """Refuse batches that cannot be cut into the micro-batches and replicas of the run. Collective."""
    several, adds_parts = inspection.topology.world_size > 1, exact.scope is LossScope.PARTS
    is_split = several or args.num_microbatches not in (None, 1)

    def find() -> str | None:
        why = why_mixed(exact, probe.structure) if is_split else None
        if is_split and adds_parts:
            why = why or why_across(exact) or (why_one_after_another(exact) if is_training else None)
        return why

    why = inspection.on_first_rank(find)
    if why is None and exact.scope is LossScope.BATCH and several and exact.inputs.sequences is not None:
        why = (
            "The collator puts all samples of a batch into one row, and a loss that is not known to be a mean or sum "
            "sees the rows of all replicas at once: expected one row a sample. Use a collator that pads, or set "
            "pipeline_loss='replica' or 'parts'."
        )
    if why is not None:
        raise LossDoesNotDecomposeError(why)


def _find_traits(
    exact: ProbeTarget,
    probe: Probe,
    args: PipeTransformerArguments,
    topology: Topology,
    num_frozen: int,
    tries_modes: bool,
) -> dict[str, Any]:
    """Return what a run has to know of its model to pad, store and gather: JSON values. Runs on one rank."""
    several, caches = topology.world_size > 1, args.activation_cache != "off"
    # Replicas join their texts for one loss, or to check one.
    joins = exact.has_padded_texts and (exact.scope is LossScope.BATCH or args.pipeline_loss == "parts")
    return {
        "pads_alike": several and (joins or depends_on_length(exact)),
        "sees_padding": not caches or depends_on_padding(exact, probe),
        "reads_first": caches and num_frozen == probe.structure.num_layers and reads_first_alone(exact, probe),
        "has_modes": caches and tries_modes and computes_otherwise_in_training(exact, probe.structure, num_frozen),
        "shape_without_rows": exact.shape_without_rows(exact.inputs) if several else None,
    }


def _measure_costs(
    target: ProbeTarget,
    probe: Probe,
    args: PipeTransformerArguments,
    inspection: Inspection,
    read: ReadBatch | None,
) -> MeasuredCosts:
    """Measure blocks and token slices on rank 0, and transfers between ranks. Collective: call on every rank."""
    topology, structure = inspection.topology, probe.structure

    def measure() -> dict[str, Any]:
        return asdict(measure_blocks(target, structure, samples_per_microbatch(args), topology.num_ranks_here, read))

    profile = BlockProfile(**inspection.on_first_rank(measure))
    # Of the size that the blocks were timed with: both stand for one micro-batch.
    times = topology.measure(int(profile.boundary_bytes * profile.num_samples))
    # Plans are for training, also where an evaluation asks.
    masters = master_names(target.model) if args.pipeline_master_dtype else set()
    blocks = block_costs(target.model, structure, profile, masters)
    if args.abilities.cuts_tokens:

        def measure_token_slices() -> dict[str, Any]:
            affordable = affordable_sequences(blocks, args.device, topology.num_ranks_here)
            most = min(args.train_samples_per_device, affordable, MOST_SEQUENCES)
            batch = target if read is None else with_batch(target, read(most))
            seconds = [sum(each) for each in zip(blocks.forward, blocks.backward, strict=True)]
            return asdict(measure_slices(batch, structure, target.rule, target.twin.share_of(seconds)))

        blocks = replace(blocks, slices=TokenCosts(**inspection.on_first_rank(measure_token_slices)))
    overheads = Overheads(
        node_size=topology.local_world_size,
        has_reference=target.has_reference,
        # The policy gradient_norm reads the norms of all stages, clipped or not.
        sums_norms=(args.max_grad_norm or 0) > 0 or args.freeze_policy == "gradient_norm",
        per_forward=profile.passing[0],
        per_backward=profile.passing[1],
        **times,
    )
    return MeasuredCosts(blocks, overheads, profile.num_samples)
