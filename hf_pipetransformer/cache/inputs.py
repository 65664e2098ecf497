"""Probe data set and collator to decide if activations of their samples can be cached.

A stored activation can stand in for its sample only if reading the sample gives the same tensors each time,
independent of the other samples in the batch, and if the collator's padding follows a known rule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch

from hf_pipetransformer.cache.chain import differs
from hf_pipetransformer.data.batches import MASK, field_digests, real_lengths
from hf_pipetransformer.data.flattened import find_sequences
from hf_pipetransformer.data.rng import fetch_samples, generators_kept, seed_on_host


NUM_SAMPLES = 8

Batch = dict[str, torch.Tensor]


class UnfitError(Exception):
    """Inputs that cannot be cached: the message says what was found and how to change it."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"found {found}; to use the cache {remedy}.")


class SampleReader:
    """Reader of small batches of samples spread evenly over a data set."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], main_input: str) -> None:
        self.dataset = dataset
        self.collate = collate
        self.main_input = main_input
        # Not the first samples: in a sorted data set they are all of one kind.
        spread = np.linspace(0, len(dataset) - 1, min(len(dataset), NUM_SAMPLES))
        self.indices = [round(index) for index in spread.tolist()]
        self._times: list[float] = []

    @property
    def seconds_per_sample(self) -> float:
        """Median time to read and collate a sample; 0 if nothing was read."""
        return float(np.median(self._times)) if self._times else 0.0

    def batch(self, indices: Sequence[int], draw: int = 0) -> Batch:
        """Return the collated batch of these samples, read with the global RNGs seeded by `draw`."""
        # Another seed for each draw: what stays equal under all of them draws nothing.
        seed = 7919 * (draw + 1)
        seed_on_host(seed, seed, seed)
        start = time.perf_counter()
        batch = self.collate(fetch_samples(self.dataset, list(indices)))
        if len(indices) == len(self.indices):
            # Time full batches only, as in training: collating a single sample costs more per sample.
            self._times.append((time.perf_counter() - start) / len(indices))
        return self.checked(batch, len(indices))

    def checked(self, batch: Any, count: int) -> Batch:
        """Return the batch as a dict of tensors `(count, ...)`, or raise `UnfitError`."""
        if not isinstance(batch, Mapping) or not isinstance(batch.get(self.main_input), torch.Tensor):
            names = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise UnfitError(
                f"a batch without a tensor {self.main_input!r}, the model's main input ({names})",
                "let the collator return a dict with it",
            )
        if find_sequences(batch, count) is not None:
            raise UnfitError(
                f"{count} samples in one row of {batch[self.main_input].shape[1]} tokens, of which no sample has a "
                "record of its own",
                "let the collator pad, or pack the data set into rows of one sample each",
            )
        for name, value in batch.items():
            remedy = "let the collator return tensors with one entry a sample only"
            if not isinstance(value, torch.Tensor):
                raise UnfitError(f"{name!r} in the batch, a {type(value).__name__}", remedy)
            if value.dim() == 0 or value.shape[0] != count:
                raise UnfitError(f"{name!r} of shape {tuple(value.shape)} in a batch of {count} samples", remedy)
        return dict(batch)


MULTIPLES = (1, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class PaddingRule:
    """Padded length of a batch as a function of the real lengths of its samples.

    Kinds: "none": no token dimension; "fixed": `size`; "multiple": the longest sample, rounded up to a multiple of
    `size`.
    """

    kind: Literal["none", "fixed", "multiple"]
    size: int = 1

    def length(self, longest: int) -> int:
        """Return the padded length if the longest sample has `longest` real tokens; 0 without a token dimension."""
        if self.kind == "none":
            return 0
        if self.kind == "fixed":
            # Collators do not truncate: a sample longer than `size` keeps its length.
            return max(self.size, longest)
        return -(-longest // self.size) * self.size


def find_padding(probe: SampleReader, batches: list[Batch]) -> PaddingRule:
    """Return the rule that explains the padding of every batch; raise `UnfitError` if none does."""
    found = [_observed(batch, probe.main_input) for batch in batches]
    found += _shortened(probe, batches)
    lengths = {padded for _, padded in found}
    # A single length proves "fixed" only if some shorter sample was padded to it.
    if len(lengths) == 1 and any(longest < padded for longest, padded in found):
        return PaddingRule("fixed", lengths.pop())
    # The smallest that explains everything: larger ones can fit by chance, and `_shortened` adds lengths that tell.
    for multiple in MULTIPLES:
        rule = PaddingRule("multiple", multiple)
        if all(rule.length(longest) == padded for longest, padded in found):
            return rule
    examples = ", ".join(f"{longest} to {padded}" for longest, padded in sorted(set(found))[:4])
    raise UnfitError(
        f"padding that follows no known rule (longest sample to length of the batch: {examples})",
        f"pad to one length, to the longest sample, or to a multiple of {', '.join(map(str, MULTIPLES[1:]))}",
    )


def _observed(batch: Batch, main_input: str) -> tuple[int, int]:
    return int(real_lengths(batch, main_input).max()), batch[main_input].shape[1]


def _shortened(probe: SampleReader, batches: list[Batch]) -> list[tuple[int, int]]:
    """Collate truncated copies of the longest sample, because samples of similar lengths fit several rules.

    Return nothing if it is the data set that pads, or if the collator rejects truncated samples.
    """
    samples = list(fetch_samples(probe.dataset, probe.indices))
    sizes = [_size(sample.get(probe.main_input)) if isinstance(sample, Mapping) else 0 for sample in samples]
    if sizes != real_lengths(batches[0], probe.main_input).tolist():
        return []
    size, sample = max(sizes), samples[sizes.index(max(sizes))]
    found = []
    for length in sorted({1, 2, size // 2, size - 1} & set(range(1, size))):
        # Everything of the length of the tokens is cut with them, such as masks and labels.
        short = {key: value[:length] if _size(value) == size else value for key, value in sample.items()}
        try:
            found.append(_observed(probe.checked(probe.collate([short]), 1), probe.main_input))
        # The collator may reject a truncated sample, because the data set never yields one.
        except Exception:
            return []
    return found


def _size(value: Any) -> int:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.shape[0] if value.ndim else 0
    return len(value) if isinstance(value, (list, tuple)) else 0


# With NUM_SAMPLES these are 128 readings: what happens to 1 % of the samples is likely to show.
NUM_DRAWS = 16


@dataclass(frozen=True)
class InputReport:
    """Result of probing a data set and its collator.

    Args:
        reason: why the cache must stay off and what to do; if set, only `seconds_per_sample` counts.
        sample_fields: dtype and per-sample shape of tensors that are not `(batch, seq)`; no placeholder main input.
        seconds_per_sample: time to read and collate a sample in this process; 0 if nothing was read.
        fill_values: padding value of each token field; a field never seen padded is absent.
    """

    reason: str | None
    padding: PaddingRule | None = None
    token_fields: dict[str, torch.dtype] = field(default_factory=dict)
    sample_fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    seconds_per_sample: float = 0.0
    fill_values: dict[str, int | float] = field(default_factory=dict)


def examine_inputs(
    dataset: Any, collate: Callable[[list[Any]], Any], main_input: str, placeholders: frozenset[str]
) -> InputReport:
    """Probe data set and collator: can an activation be stored and reused for the same sample?

    Reads 8 samples spread over the data set under 16 different seeds, then in reversed order, in pairs and one by one:
    about 160 reads, twice as many if something is random. Randomness that affects far fewer than 1 % of the samples
    can go unnoticed. RNG states of Python, numpy, torch, and of generators inside data set and collator are restored.
    `main_input` names the input that the embeddings read, `placeholders` the batch entries that only they read.
    """
    probe = None
    try:
        _check_dataset(dataset)
        probe = SampleReader(dataset, collate, main_input)
        with generators_kept(dataset, collate):
            return _examine(probe, placeholders)
    except UnfitError as error:
        unfit = error
    # User code may raise anything on an unusual batch (a single sample, say); the run then goes on without a cache.
    except Exception as error:
        unfit = UnfitError(
            f"that samples cannot be read and collated in small batches ({type(error).__name__}: {error})",
            f"let data set and collator take any 1 to {NUM_SAMPLES} samples",
        )
    return InputReport(str(unfit), seconds_per_sample=probe.seconds_per_sample if probe else 0.0)


def _check_dataset(dataset: Any) -> None:
    name = type(dataset).__name__
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UnfitError(f"a data set without length or index ({name})", "give one that is indexed")
    if len(dataset) == 0:
        raise UnfitError(f"an empty data set ({name})", "give one with samples")
    if hasattr(dataset, "set_epoch"):
        raise UnfitError(
            f"a data set with set_epoch ({name}), whose samples may change from epoch to epoch",
            "give one whose samples stay the same, without that method",
        )


def _examine(probe: SampleReader, placeholders: frozenset[str]) -> InputReport:
    main_input, indices = probe.main_input, probe.indices
    whole = probe.batch(indices)
    _check_main_input(whole[main_input], main_input, placeholders)
    has_tokens = not whole[main_input].is_floating_point()
    parts = [indices[::-1], *([index] for index in indices), *pairwise(indices)]
    # Single samples and pairs expose padding and mixing that the full batch hides.
    groups: list[Sequence[int]] = [indices, *parts]
    batches = [whole, *(probe.batch(part) for part in parts)]
    _check_alike(batches)
    token_fields, fill_values = frozenset[str](), dict[str, int | float]()
    if has_tokens:
        token_fields = frozenset(
            name for name in whole if all(batch[name].shape == batch[main_input].shape for batch in batches)
        )
        _check_padding_side(batches, main_input)
        token_fields, fill_values = _find_fill_values(batches, token_fields, main_input)
    # Before `_check_mixing`: a field that is random differs between two batches as well.
    _check_draws(probe, whole, token_fields)
    _check_mixing(groups, batches, token_fields, main_input)
    sample_fields = _find_sample_fields(batches, token_fields)
    # No record holds it: only the embeddings read it, and cached samples skip these.
    if not has_tokens:
        del sample_fields[main_input]
    return InputReport(
        reason=None,
        padding=find_padding(probe, batches) if has_tokens else PaddingRule("none"),
        token_fields={name: whole[name].dtype for name in whole if name in token_fields},
        sample_fields=sample_fields,
        seconds_per_sample=probe.seconds_per_sample,
        fill_values=fill_values,
    )


def _check_main_input(value: torch.Tensor, main_input: str, placeholders: frozenset[str]) -> None:
    """Refuse a main input that is neither `(batch, seq)` of tokens nor what the embeddings alone read."""
    if value.is_floating_point() and main_input not in placeholders:
        raise UnfitError(
            f"that more than the embeddings reads {main_input!r}, which is too large to be stored beside an "
            "activation",
            "take a model whose layers and loss do without it",
        )
    if not value.is_floating_point() and value.dim() != 2:
        raise UnfitError(
            f"{main_input!r} of shape {tuple(value.shape)} and {value.dtype}",
            "give token ids (batch, seq) or floating point images",
        )


def _check_alike(batches: list[Batch]) -> None:
    expected = {name: value.dtype for name, value in batches[0].items()}
    for batch in batches:
        found = {name: value.dtype for name, value in batch.items()}
        if found != expected:
            differing = sorted(name for name, _ in set(found.items()) ^ set(expected.items()))
            raise UnfitError(
                f"that {_listed(differing)} are absent or of another dtype in some batches",
                "let the collator return the same fields for all samples",
            )


def _check_padding_side(batches: list[Batch], main_input: str) -> None:
    if MASK not in batches[0]:
        lengths = sorted({batch[main_input].shape[1] for batch in batches})
        if len(lengths) > 1:
            raise UnfitError(
                f"batches of different lengths ({lengths[0]} to {lengths[-1]}) without {MASK!r}, so that padding "
                "cannot be told from tokens",
                f"let the collator return {MASK!r}",
            )
        return
    for batch in batches:
        mask = batch[MASK]
        if mask.shape != batch[main_input].shape:
            shape = tuple(batch[main_input].shape)
            raise UnfitError(
                f"{MASK!r} of shape {tuple(mask.shape)} beside {main_input!r} of shape {shape}",
                "give one value a token",
            )
        shown = mask != 0
        # A record holds the tokens from the first position to the last real one.
        if bool((shown.any(dim=1) & ~shown[:, 0]).any()):
            raise UnfitError("text that is padded on the left", 'set padding_side="right" in the tokenizer')


def _find_fill_values(
    batches: list[Batch], token_fields: frozenset[str], main_input: str
) -> tuple[frozenset[str], dict[str, int | float]]:
    """Return the token fields that are padded with a single value, and those values."""
    fills: dict[str, set[int | float]] = {name: set() for name in token_fields}
    for batch in batches:
        lengths = torch.from_numpy(real_lengths(batch, main_input))
        is_padding = torch.arange(batch[main_input].shape[1]) >= lengths[:, None]
        for name in token_fields:
            fills[name].update(batch[name][is_padding].unique().tolist())
    mixed = {name for name, values in fills.items() if len(values) > 1}
    if main_input in mixed:
        raise UnfitError(
            f"different values in {main_input!r} behind the last token that {MASK!r} shows",
            f"let {MASK!r} show every token, and pad with one value",
        )
    values = {name: next(iter(found)) for name, found in sorted(fills.items()) if len(found) == 1}
    # A field padded with several values cannot be padded again; it needs one shape for all samples then.
    return token_fields - mixed, values


def _check_draws(probe: SampleReader, whole: Batch, token_fields: frozenset[str]) -> None:
    def digests(batch: Batch) -> dict[str, bytes]:
        found = field_digests(batch, real_lengths(batch, probe.main_input), token_fields)
        return {name: values.tobytes() for name, values in found.items()}

    expected = digests(whole)
    changed: set[str] = set()
    for draw in range(1, NUM_DRAWS):
        changed |= {name for name, _ in digests(probe.batch(probe.indices, draw)).items() ^ expected.items()}
    if not changed:
        return
    # A batch of one rules out mixing: what still changes is randomness within the sample.
    alone = {index: probe.batch([index]) for index in probe.indices}
    is_own = any(
        _is_other(probe.batch([index], draw), batch) for draw in range(1, NUM_DRAWS) for index, batch in alone.items()
    )
    names = _listed(sorted(changed))
    if not is_own:
        raise _mixing(names)
    what, why, remedy = "tokens or labels", " (random masking in the collator?)", "mask once, in the data set"
    if whole[probe.main_input].is_floating_point() and probe.main_input in changed:
        what, why = "augmentation", ""
        remedy = (
            "transform the images always alike, or give each image several rows, each augmented in a way of its own "
            "(docs/recipes/imagenet.md, Several crops of each image)"
        )
    raise UnfitError(f"random {what}: {names} of the same samples change from one reading to the next{why}", remedy)


def _is_other(found: Batch, expected: Batch) -> bool:
    """Return True if two batches differ by more than rounding: mixup of a sample with itself is not bitwise exact."""
    return found.keys() != expected.keys() or any(differs(found[name], expected[name], 1e-3) for name in expected)


def _mixing(names: str) -> UnfitError:
    found = f"that the batch mixes samples (mixup?): {names} of a sample depend on the others in its batch or on their"
    return UnfitError(f"{found} order", "let the collator treat each sample by itself")


def _check_mixing(
    groups: list[Sequence[int]], batches: list[Batch], token_fields: frozenset[str], main_input: str
) -> None:
    """Raise `UnfitError` if a sample differs between two batches that contain it."""
    changed: set[str] = set()
    expected: dict[tuple[int, str], int] = {}
    for indices, batch in zip(groups, batches, strict=True):
        for name, digests in field_digests(batch, real_lengths(batch, main_input), token_fields).items():
            for index, digest in zip(indices, digests.tolist(), strict=True):
                if expected.setdefault((index, name), digest) != digest:
                    changed.add(name)
    # A field that changes shape between batches is reported by `_find_sample_fields`, not as mixing.
    changed = {name for name in changed if name in token_fields or len(_sample_shapes(batches, name)) == 1}
    if changed:
        raise _mixing(_listed(sorted(changed)))


def _sample_shapes(batches: list[Batch], name: str) -> list[tuple[int, ...]]:
    return sorted({tuple(batch[name].shape[1:]) for batch in batches})


def _find_sample_fields(
    batches: list[Batch], token_fields: frozenset[str]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    fields = {}
    for name, value in batches[0].items():
        if name in token_fields:
            continue
        shapes = _sample_shapes(batches, name)
        if len(shapes) > 1:
            raise UnfitError(
                f"{name!r} of shape {shapes[0]} and of shape {shapes[-1]} a sample",
                "give it one size in all batches (resized images, text padded to one length)",
            )
        fields[name] = (value.dtype, shapes[0])
    return fields


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
