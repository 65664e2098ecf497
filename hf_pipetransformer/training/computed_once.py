"""What a script froze of a model that Trainer trains: it is computed once and looked up from then on.

The prefix of a stack on pipeline stages has a cache of its own, see `cache.training`; here are towers, encoders and
feature extractors of models whose forward runs as it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from transformers import TrainerCallback, set_seed

from hf_pipetransformer import trainer_compat
from hf_pipetransformer.cache.chain import SAME_BATCH_TOLERANCE, PrefixWatch, differs, settings_of
from hf_pipetransformer.cache.files import StoreDamagedError
from hf_pipetransformer.cache.folder import safe_max_bytes
from hf_pipetransformer.cache.opening import cache_base, stored_dtype
from hf_pipetransformer.cache.planner import measure_storage
from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.comm.staging import is_apart
from hf_pipetransformer.comm.transfers import digest_of
from hf_pipetransformer.data.batches import batch_size, take_samples
from hf_pipetransformer.data.rng import generators_kept
from hf_pipetransformer.frozen.contents import ContentStore, record_format
from hf_pipetransformer.frozen.part import FrozenPart
from hf_pipetransformer.frozen.trial import Found, Trial, maximal_frozen
from hf_pipetransformer.frozen.values import Rows, tensors_of
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.options.refusals import precision_of
from hf_pipetransformer.planning.storing import CacheCosts, Stored, decide_cache
from hf_pipetransformer.report import announce, in_bytes
from hf_pipetransformer.runtime.context import Context
from hf_pipetransformer.splitters.adapters import bare_model
from hf_pipetransformer.training.traces import leaving_no_trace


NUM_TRIED = 4
"""Samples that the model is tried on."""
NUM_CHECKED = 1
"""Rows that a check computes again: twice an epoch, and of a large encoder each takes a second."""
WORTH_SECONDS = 2.0
"""Predicted gain over the run below which `auto` makes no store."""
MOST_ROWS = 2**20
"""Records of a data set of unknown length."""


@dataclass
class _Serving:
    """A part that is looked up, and what tells that it still computes what its records hold."""

    part: FrozenPart
    given: Rows
    """Rows that checks compute again."""
    output: list[torch.Tensor]
    watch: PrefixWatch
    store: ContentStore
    num_distrusted: int = 0
    has_served: int = 0
    """Rows found up to the last check."""


class ComputedOnce:
    """Stores of the frozen parts of a model in one training; `begin_step` comes before each of its batches."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.trainer = context.trainer
        self._serving: list[_Serving] = []
        self._is_tried = False
        self._epoch = -1
        self._checked_at = 0
        self._evaluates = False
        self._at_end = _ChecksEpochs(self)

    @property
    def args(self) -> PipeTransformerArguments:
        return self.context.args

    def begin_step(self, inputs: Mapping[str, Any]) -> None:
        """Find the parts before the first batch, and check them before later ones.

        Raises:
            ValueError: a part was changed unseen, and batches since the last check may have read records of before.
        """
        if not self._is_tried:
            self._is_tried = True
            self._begin(inputs)
        elif self._serving:
            self._check()

    @contextmanager
    def evaluating(self, generates: bool) -> Iterator[None]:
        """Serve evaluations inside, after noticing weights that were changed since the last step.

        With `generates`, only parts whose records have all of their outputs: what generation reads was not tried.
        """
        self._notice_changed_weights()
        before, self._evaluates = self._evaluates, not generates
        try:
            yield
        finally:
            self._evaluates = before

    def end(self) -> None:
        """Let the modules run their own forward again, and say what was saved."""
        for serving in self._serving:
            del serving.part.module.forward
            serving.store.close()
            counts = serving.part.counts
            looked_up = counts.hits + counts.misses
            if looked_up:
                self._say(
                    f"{serving.part.name}: {counts.hits} of {looked_up} outputs were read instead of computed "
                    f"({counts.hits / looked_up:.0%})."
                )
        self._serving.clear()
        if self._at_end in self.trainer.callback_handler.callbacks:
            self.trainer.remove_callback(self._at_end)
        self._is_tried = False

    # ---- finding and deciding ----

    def _begin(self, inputs: Mapping[str, Any]) -> None:
        model = bare_model(self.trainer.model)
        # Others run copies or parts of the modules.
        is_alone = self.context.topology.world_size == 1 and self.args.n_gpu <= 1
        is_alone &= not (self.trainer.is_deepspeed_enabled or self.trainer.is_fsdp_enabled)
        if self.args.activation_cache == "off" or not is_alone or not maximal_frozen(model):
            return
        size = batch_size(inputs)
        num_samples = min(NUM_TRIED, size)
        try:
            with leaving_no_trace(self.trainer), _buffers_kept(model):
                trial = self._trial(take_samples(inputs, slice(0, num_samples)), model)
                found = trial.find()
        # Models and losses of users may fail on a few samples in any way; Trainer's own step says so if it fails too.
        except Exception as error:
            self._say(f"Frozen parts are computed as in Trainer: trying them raised {type(error).__name__}: {error}")
            return
        if not found and self.args.activation_cache == "on":
            self._say("activation_cache='on' stores nothing: no frozen part takes a share of the forward to speak of.")
        for each in found:
            if each.why_not is not None:
                self._say_why_not(each, trial)
            else:
                self._decide(each, trial, num_samples)
        self._epoch, self._checked_at = self._present_epoch, self.trainer.state.global_step
        if self._serving:
            # Before the user's own, which may change a part when an epoch has ended.
            self.trainer.callback_handler.callbacks.insert(0, self._at_end)

    def _trial(self, inputs: dict[str, Any], model: nn.Module) -> Trial:
        trainer = self.trainer
        given = trainer_compat.preparation(trainer)(inputs)
        passes = trainer_compat.takes_num_items(trainer) and "labels" in inputs
        items = torch.tensor(trainer_compat.items_of(trainer, inputs), device=self.args.device) if passes else None

        def run() -> tuple[torch.Tensor, Any]:
            set_seed(self.args.seed)
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(
                    trainer.model_wrapped, dict(given), return_outputs=True, num_items_in_batch=items
                )

        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        return Trial(model, run, tensors, precision_of(self.args), self.args.activation_cache == "on")

    def _say_why_not(self, found: Found, trial: Trial) -> None:
        share = found.seconds * found.rows / trial.seconds if trial.seconds else 0.0
        text = f"{found.part.name} is frozen and computed as in Trainer in every epoch: it {found.why_not}."
        if found.has_dropout:
            text += (
                " activation_cache='on' stores its outputs, computed in evaluation mode: other numbers, and "
                f"{share:.0%} of a forward less from the second epoch on."
            )
        self._say(text)

    def _decide(self, found: Found, trial: Trial, num_samples: int) -> None:
        part, rows = found.part, Rows.of(found.call.args, found.call.kwargs, found.part.reading.cuts_padding)
        leaves = tensors_of(found.call.output)
        records = part.reading.records(leaves, rows)
        base, num_places = cache_base(self.args), self._num_rows(rows.number / num_samples)
        try:
            content = record_format(records.shape[2], stored_dtype(self.args, records.dtype))
            record_bytes, limit = content.record_bytes(records.shape[1]), self._max_bytes()
            needed = num_places * record_bytes + content.index_bytes(num_places)
            speed = measure_storage(base, content, records.shape[1], rows.number, num_places)
            hashing = _seconds_of_hashing(rows)
            costs = CacheCosts(
                (0.0, found.seconds), 0.0, speed.read + hashing, speed.write + hashing, is_apart(self.args.device)
            )
            fits = min(1.0, limit / needed)
            decision = decide_cache(costs, 1, Stored(fits_share=fits), self._epochs_left(), self.args.activation_cache)
            saved = (decision.costs["compute"] - decision.costs.get("write", math.inf)) * num_places
            if not decision.use or (self.args.activation_cache == "auto" and saved < WORTH_SECONDS):
                return
            self.context.journal.write(
                "cache", what="part", part=part.name, used=decision.use, reason=decision.reason, seconds=decision.costs
            )
            store = ContentStore(base, num_places, content, int(limit), self._key_of_store(part, content))
        except (OSError, ValueError, StoreDamagedError) as error:
            self._say(f"{part.name} is frozen and computed as in Trainer in every epoch: {error}")
            return
        part.store, part.is_read_as_tried = store, partial(self._is_read_as_tried, part)
        given = rows.take(np.arange(min(NUM_CHECKED, rows.number)))
        serving = _Serving(part, Rows.of(*given), [], _watch_of(part), store)
        self._name_weights(serving)
        part.module.forward = part
        self._serving.append(serving)
        rest = 3 * (trial.seconds / num_samples) - 3 * found.seconds * rows.number / num_samples
        before = rest + found.seconds * rows.number / num_samples
        after = rest + (speed.read + hashing) * rows.number / num_samples
        size = sum(parameter.numel() for parameter in part.module.parameters())
        mode = " in evaluation mode, without dropout" if part.in_evaluation else ""
        self._say(
            f"{part.name} ({size / 1e6:,.3g} million parameters) is frozen: it is computed once{mode}. Its outputs "
            f"are stored ({in_bytes(record_bytes)} each, {in_bytes(needed)} in all) and read from the second epoch "
            f"on: about {before / after:.1f} times as fast then."
        )
        if len(store):
            self._say(f"{part.name}: {len(store)} outputs of an earlier run are used where inputs are the same.")

    def _is_read_as_tried(self, part: FrozenPart) -> bool:
        return bool(self.trainer.model.training) or (self._evaluates and part.reading.does_for_evaluations)

    def _num_rows(self, of_a_sample: float) -> int:
        evaluated = self.trainer.eval_dataset
        others = evaluated.values() if isinstance(evaluated, dict) else [evaluated]
        known = [each for each in (self.trainer.train_dataset, *others) if each is not None]
        if not all(hasattr(each, "__len__") for each in known):
            return MOST_ROWS
        return int(1.1 * of_a_sample * sum(map(len, known))) + 64

    def _max_bytes(self) -> float:
        asked = self.args.activation_cache_max_gb
        taken = sum(serving.store.bytes_taken for serving in self._serving)
        return safe_max_bytes(cache_base(self.args)) if asked is None else max(0.0, asked * 1e9 - taken)

    def _epochs_left(self) -> float:
        state, loader = self.trainer.state, self.trainer.callback_handler.train_dataloader
        if not hasattr(self.trainer.train_dataset, "__len__") or not hasattr(loader, "__len__"):
            return float(self.args.num_train_epochs) if self.args.max_steps <= 0 else 1.0
        steps = max(1, len(loader) // self.args.gradient_accumulation_steps)
        return (state.max_steps - state.global_step) / steps

    def _key_of_store(self, part: FrozenPart, content: RecordFormat) -> str | None:
        if not self.args.activation_cache_keep:
            return None
        return f"part-{xxhash.xxh3_128_hexdigest(f'{self._weights_key(part)}{content.to_json()}'.encode())}"

    def _weights_key(self, part: FrozenPart) -> str:
        hasher = xxhash.xxh3_128(settings_of(bare_model(self.trainer.model), self.args).encode())
        for name, value in sorted(part.module.state_dict().items()):
            digest = digest_of(value) if isinstance(value, torch.Tensor) else repr(value)
            hasher.update(f"{name} {digest}\n".encode())
        hasher.update(f"{part.name} {part.reading} {part.in_evaluation}".encode())
        return hasher.hexdigest()

    # ---- checking ----

    @property
    def _present_epoch(self) -> int:
        return int(self.trainer.state.epoch or 0)

    def _name_weights(self, serving: _Serving) -> None:
        """Serve records of the part's present weights."""
        serving.watch, serving.output = _watch_of(serving.part), self._computed(serving)
        serving.store.use_weights(f"{self._weights_key(serving.part)} {serving.num_distrusted}")

    def _computed(self, serving: _Serving) -> list[torch.Tensor]:
        """Return what the part makes of the rows of its checks, without a trace in the generators."""
        with generators_kept(), torch.no_grad(), self.trainer.compute_loss_context_manager():
            return tensors_of(serving.part.compute(*serving.given.given))

    def _check(self) -> None:
        self._notice_changed_weights()
        if self._present_epoch != self._epoch:
            self.check_thoroughly()
            self._epoch = self._present_epoch
            for serving in list(self._serving):
                self._stop_if_useless(serving)

    def _notice_changed_weights(self) -> None:
        for serving in self._serving:
            if serving.watch.has_changed():
                self._say(f"Weights of {serving.part.name} were changed from outside: its outputs are computed again.")
                self._name_weights(serving)

    def check_thoroughly(self) -> None:
        """Check all bytes of the parts' weights, and what they compute, at the begin and the end of an epoch.

        Raises:
            ValueError: a part was changed unseen, and batches since the last check may have read records of before.
        """
        tolerance = SAME_BATCH_TOLERANCE[precision_of(self.args)]
        for serving in self._serving:
            part, found = serving.part, self._computed(serving)
            is_other = any(differs(one, other, tolerance) for one, other in zip(found, serving.output, strict=True))
            if is_other or serving.watch.has_changed(thoroughly=True):
                if part.counts.hits > serving.has_served:
                    step = self.trainer.state.global_step
                    raise ValueError(
                        f"Steps {self._checked_at + 1} to {step} may have used stored outputs of {part.name} that do "
                        "not hold any more: it computes something else now, and no version counter shows it (a write "
                        "past autograd, a hook, another module or an attribute). Change it between epochs "
                        "(on_epoch_begin), write with parameter.copy_() under torch.no_grad(), or set "
                        "activation_cache='off'."
                    )
                serving.num_distrusted += 1
                self._say(f"{part.name} was changed from outside: its outputs are computed again.")
                self._name_weights(serving)
            serving.has_served = part.counts.hits
        self._checked_at = self.trainer.state.global_step

    def _stop_if_useless(self, serving: _Serving) -> None:
        """End the storing of a part none of whose inputs came again in a whole epoch."""
        counts = serving.part.counts
        if self._epoch < 2 or counts.hits or not counts.misses:
            return
        self._say(
            f"{serving.part.name} is computed from here on: none of its inputs came a second time (random "
            "augmentation?), so nothing is stored any more."
        )
        del serving.part.module.forward
        serving.store.close()
        self._serving.remove(serving)

    def _say(self, text: str) -> None:
        if self.context.topology.rank == 0:
            announce(text)


class _ChecksEpochs(TrainerCallback):
    """Checks the parts when an epoch has ended."""

    def __init__(self, computed_once: ComputedOnce) -> None:
        self._computed_once = computed_once

    def on_epoch_end(self, *_args: Any, **_kwargs: Any) -> None:
        self._computed_once.check_thoroughly()


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put back what forwards in training mode write into buffers, such as the statistics of batch normalization."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _watch_of(part: FrozenPart) -> PrefixWatch:
    return PrefixWatch([*part.module.parameters(), *part.module.buffers()])


def _seconds_of_hashing(rows: Rows) -> float:
    start = time.perf_counter()
    rows.digests(b"")
    return (time.perf_counter() - start) / rows.number
