"""Whether what frozen layers give may be stored: the samples of a data set, and the folder for them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autocache.folder import check_base, default_base, delete_leftovers, open_root
from hf_pipetransformer.autocache.inputs import InputReport, examine_inputs
from hf_pipetransformer.autocache.parts import DRAW_FIELD, LENGTH_FIELD, SampleSource
from hf_pipetransformer.autocache.rows import RowFormat
from hf_pipetransformer.autodp.dealt import DealtLoader
from hf_pipetransformer.autodp.loader import PipelineLoader
from hf_pipetransformer.autodp.stream import StreamLoader
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.report.events import logger
from hf_pipetransformer.run.journal import Journal
from hf_pipetransformer.run.node_orders import why_not_on_nodes
from hf_pipetransformer.startup import StartUp


@dataclass(frozen=True)
class CacheInputs:
    """Says of data sets whether, and in which form, activations of their samples may be stored."""

    args: PipeTransformerArguments
    topology: Topology
    journal: Journal
    start_up: StartUp

    @property
    def base(self) -> Path:
        """The folder that stores lie in."""
        return cache_base(self.args)

    def source_of(self, loader: Any, is_training: bool = True) -> SampleSource | None:
        """The samples of a loader, if what frozen layers give for them may be stored. A collective call."""
        report = self._examined(loader)
        if report.reason is not None:
            others = " Or set activation_cache_views to the number of draws of each sample that it may store."
            is_helped = is_training and report.is_random and not self.args.activation_cache_views
            self.say_off(report.reason + (others if is_helped else ""), is_training)
            return None
        probe, start_up = self.start_up.probe, self.start_up
        return SampleSource(
            read=loader.read,
            main_input=probe.activation.main_input,
            report=report,
            row_length=probe.activation.hidden_shape[0],
            hidden_size=probe.activation.hidden_shape[-1],
            main_shape=probe.activation.input_shape,
            main_dtype=start_up.main_dtype,
            pad_token_id=start_up.pad_token_id,
            keeps_padding=start_up.sees_padding,
            views=None if loader.views is None else loader.views.code,
        )

    def row_format(self, source: SampleSource) -> RowFormat:
        """How a sample is stored."""
        sample_fields = dict(source.report.sample_fields)
        if source.is_text:
            sample_fields[LENGTH_FIELD] = (torch.int32, ())
        if source.views is not None:
            sample_fields[DRAW_FIELD] = (torch.int32, ())
        return RowFormat(source.hidden_size, self._stored_dtype(), source.report.token_fields, sample_fields)

    def say_off(self, reason: str, is_training: bool) -> None:
        """Tell the user once that nothing of the training, or of an evaluation set, is stored, and why."""
        self.journal.write("cache", what="off" if is_training else "evaluation off", reason=reason)
        if self.topology.rank == 0:
            what = "The activation cache stays off" if is_training else "The evaluation set is not stored"
            logger.warning(f"{what}: {reason}")

    def _examined(self, loader: Any) -> InputReport:
        """What the ranks found out about the inputs, or why they did not look."""
        reason = None
        if not isinstance(loader, PipelineLoader):
            reason = (
                f"get_train_dataloader returned a {type(loader).__name__}, which does not say which samples it reads. "
                "Build it with self._get_dataloader."
            )
        elif isinstance(loader, StreamLoader):
            reason = (
                f"the data set is a stream ({type(loader.dataset).__name__}): without indices no sample is known "
                "again. Use a data set with indices."
            )
        elif len(self.start_up.probe.activation.hidden_shape) != 2:
            shape = ("batch", *self.start_up.probe.activation.hidden_shape)
            reason = f"the layers' activations are of shape {shape}: expected three dimensions, (batch, seq, hidden)."
        elif self.start_up.probe.activation.changes_length:
            tokens, (length, _) = (
                self.start_up.probe.activation.input_shape[0],
                self.start_up.probe.activation.hidden_shape,
            )
            reason = (
                f"the layers' activations have {length} positions for {tokens} tokens, or other numbers for other "
                "lengths: expected one a token."
            )
        else:
            reason = why_not_on_nodes(loader, self.topology) or self._refused_base()
        if reason is not None:
            return InputReport(reason)
        probe = self.start_up.probe
        dataset = loader.dataset if loader.views is None else loader.samples
        report = examine_inputs(dataset, loader.collate, probe.activation.main_input, probe.placeholders)
        try:
            RowFormat(1, self._stored_dtype(), report.token_fields, report.sample_fields)
        except ValueError as error:
            report = InputReport(report.reason or str(error))
        if report.reason is None and isinstance(loader, DealtLoader):
            report = InputReport(
                "data set or collator draw random numbers, so that one process reads for all and none knows which "
                "samples it has. Give such that draw none, although what they give is the same each time."
            )
        reason = self.first_told(report.reason)
        return report if reason is None else InputReport(reason, is_random=report.is_random)

    def first_told(self, reason: str | None) -> str | None:
        """What one rank noticed holds for all: the first rank's reason that has one. A collective call."""
        topology = self.topology
        for rank, told in enumerate(topology.gather(reason)):
            if told is not None:
                node = next(node for node in topology.nodes if rank in node)
                return str(told) if 0 in node else f"on the node of rank {node[0]}: {told}"
        return None

    def _refused_base(self) -> str | None:
        """Why a folder cannot hold a store; one that was asked for is refused. A collective call."""
        reason = self.first_told(_error_of(self.base) if self.topology.is_first_here else None)
        if reason is not None and (self.args.activation_cache_dir is not None or self.args.activation_cache == "on"):
            raise ValueError(reason)
        return reason

    def _stored_dtype(self) -> torch.dtype:
        name = self.args.activation_cache_dtype
        if name != "auto":
            asked: torch.dtype = getattr(torch, name)
            return asked
        autocast = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        return autocast or self.start_up.probe.boundary_dtypes[-1]


def _error_of(base: Path) -> str | None:
    try:
        check_base(base)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def cache_base(args: PipeTransformerArguments) -> Path:
    """The folder that stores lie in."""
    return Path(args.activation_cache_dir or default_base())


def remove_old_stores(args: PipeTransformerArguments) -> None:
    """Delete the stores that killed runs left here; for the first rank on a machine, of any run."""
    with suppress(OSError, ValueError):
        delete_leftovers(open_root(cache_base(args)))
