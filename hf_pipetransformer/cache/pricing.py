"""Measured costs of the activation cache for the search of a layout, and the log of what it decides to store."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from hf_pipetransformer.cache.files import Array, StoreDamagedError
from hf_pipetransformer.cache.storage import StorageSpeed
from hf_pipetransformer.cache.store import StoreSize
from hf_pipetransformer.planning.blocks import BlockCosts, active_seconds
from hf_pipetransformer.planning.layouts import Choice
from hf_pipetransformer.planning.search import prefix_seconds
from hf_pipetransformer.planning.storing import Storing, decide_cache
from hf_pipetransformer.report import announce, in_bytes, logger


if TYPE_CHECKING:
    from hf_pipetransformer.cache.cache import ActivationCache


WORTHWHILE_SHARE = 0.5
"""A store for a smaller share of the samples than this is warned of."""


@dataclass
class CachePlanner:
    """Measurements of the activation cache, made once (PipeTransformer, section 3.4).

    Times are measured on this node; with several nodes, rank 0's measurements decide for all.

    Args:
        mode: `auto`, `on` or `off`.
        measure: measures the storage; called once, on first use.
        size: bytes that a store of all samples takes on this node, and the limit.
        write: writes an event to the journal.
        dropout_from: number of frozen layers from which on storing would take dropout from layers that the script
            froze. `auto` stores nothing there, because by default no number differs from Trainer's.
        is_apart: True if records are read and written beside the device's computation, see `Storing`; `num_at_once`
            likewise.
    """

    mode: str
    measure: Callable[[], StorageSpeed]
    size: StoreSize
    steps_per_epoch: int
    write: Callable[..., None]
    is_apart: bool = False
    num_at_once: int = 1
    dropout_from: float = math.inf
    _cache: ActivationCache | None = field(default=None, init=False)
    _samples: Array = field(default_factory=lambda: np.arange(0), init=False)
    _speed: StorageSpeed | None = field(default=None, init=False)
    _of_evaluation: Storing | None = field(default=None, init=False)
    _is_size_known: bool = field(default=False, init=False)
    has_said_dropout: bool = field(default=False, init=False)

    def follow(self, cache: ActivationCache, samples: Array) -> None:
        """Base later decisions on this cache and on `samples`, those that this node stores."""
        self._cache, self._samples = cache, samples

    def storing(self, stored_level: int = 0, active: float = 0.0, pipeline_size: int = 1) -> Storing:
        """Return the measured costs and what is stored now; turn the cache off if that cannot be measured.

        Args:
            stored_level: the number of layers that stored records cover now; 0 if nothing is stored.
            active: computation above the frozen layers in the steps that were measured, in seconds per sample on one
                device; `pipeline_size` stages share it.
        """
        cache, share = self._cache, 0.0
        if cache is not None and cache.store.dropped is not None:
            self.mode = "off"
        try:
            self._speed = self._speed or self.measure()
            if cache is not None and stored_level and self.mode != "off":
                share = cache.stored_share(self._samples)
        except (OSError, ValueError, StoreDamagedError) as error:
            # Zeros stand in for the unknown speed: in this mode nothing is stored, whatever it would cost.
            self.mode, self._speed = "off", self._speed or StorageSpeed(0.0, 0.0)
            logger.warning(f"The activation cache stays off: {error}")
        found = Storing(
            prefix=(),
            read=self._speed.read,
            write=self._speed.write,
            is_apart=self.is_apart,
            num_at_once=self.num_at_once,
            mode=self.mode,
            level=stored_level,
            share=share,
            fits_share=self.size.share,
            steps_per_epoch=self.steps_per_epoch,
            dropout_from=self.dropout_from,
        )
        return replace(found, now=share * found.beside(active, pipeline_size).reading())

    def report(
        self,
        step: int,
        choice: Choice,
        steps_left: int,
        storing: Storing,
        blocks: BlockCosts,
        would: Choice | None = None,
    ) -> None:
        """Log what a search chose to store from `step` (optimizer steps done so far) on, for `steps_left` steps.

        Args:
            storing: the costs that it compared, with those of the `blocks`.
            would: what would have been stored if the layers that the script froze had no dropout; None if that does
                not matter.
        """
        way, layout = choice.way, choice.layout
        num_frozen, prefix = layout.num_frozen_layers, prefix_seconds(blocks)
        active = active_seconds(blocks, num_frozen)
        # Nothing runs backward in an evaluation, nor with dropout. In training that takes twice as long as a forward.
        costs = replace(storing, prefix=prefix, num_at_once=1, level=0, share=0.0, dropout_from=math.inf)
        self._of_evaluation = replace(costs, steps_per_epoch=1.0).beside(active / 3, layout.pipeline_size)
        if would is not None:
            self._say_dropout(would)
        self.write(
            "cache",
            what="decision",
            level=way.level,
            num_frozen_layers=num_frozen,
            reason=way.reason,
            seconds_left=dict(way.seconds),
            prefix_s=prefix[num_frozen],
            read_s=storing.read,
            write_s=storing.write,
            epochs_left=steps_left / storing.steps_per_epoch,
            stored_share=storing.share,
            fits_share=self.size.share,
            needed_bytes=self.size.needed,
            allowed_bytes=self.size.allowed,
            active_s=active,
            pipeline_size=layout.pipeline_size,
            num_at_once=self.num_at_once,
        )
        does = f"stored after {way.level} layers" if way.use else "not stored"
        announce(f"Step {step}: activations of frozen layers are {does} ({way.reason}).", is_decision=True)
        if way.use:
            self._announce_size()

    def _say_dropout(self, would: Choice) -> None:
        """Log once what storing would save and change where `auto` keeps the dropout of the script's frozen layers."""
        if self.has_said_dropout or not would.way.use:
            return
        self.has_said_dropout = True
        seconds = would.way.seconds
        saved = 1 - seconds[would.way.name] / seconds["compute"]
        announce(
            "Layers that the script froze compute something else in training mode (dropout, for example) and are "
            "computed as in Trainer. activation_cache='on' would store what they give in evaluation mode: about "
            f"{saved:.0%} less time for the rest of the run, and other numbers."
        )

    def _announce_size(self) -> None:
        """Log once what a store of all samples takes and may take; warn if most samples find no room in it."""
        if self._is_size_known:
            return
        self._is_size_known, size = True, self.size
        needed, share = f"A record of every sample needs {in_bytes(size.needed)} on this node", size.share
        if share >= 1:
            announce(f"{needed}; the activation cache may take {in_bytes(size.allowed)}.")
            return
        text = f"{needed}, and the activation cache may take {in_bytes(size.allowed)}: {share:.0%} of them are stored."
        if share >= WORTHWHILE_SHARE:
            announce(text)
        else:
            logger.warning(
                f"{text} The others are computed in every epoch. Raise activation_cache_max_gb, name a larger disk "
                "with activation_cache_dir, halve the records with activation_cache_dtype='bfloat16', or delete what "
                "earlier runs kept: hf-pipetransformer cache prune."
            )

    def pays_for_evaluation(self, level: int, passes_left: float, fits_share: float) -> bool:
        """Return True if an evaluation set is worth caching, by the costs of the last decision on the training set.

        Args:
            level: the number of blocks cached for the training set.
            passes_left: how often the set will be read, including this time.
            fits_share: share of the evaluation set that fits into the remaining space, 0 to 1.
        """
        if self._of_evaluation is None:
            return self.mode == "on" and passes_left > 1  # Layouts are replayed: nothing was measured.
        storing = replace(self._of_evaluation, mode=self.mode, fits_share=fits_share)
        return decide_cache(storing, level, passes_left).use
