"""Batch operations: splitting, counting the items of a loss, padding, joining, tags and digests of stored samples.

A sample is one row of a batch, or several: a pair of texts, say. Then the rows are in blocks: first one row of every
sample, in order, then the next one of each (TRL: all chosen texts, then all rejected ones). Entries with a single
value a sample stand beside them. `note_samples` looks how the samples of a new batch lie, which is a `SampleBatch`.

What has no row for each sample (patches, crops, grids of images) cannot be cut. A batch with such entries is collated
piece by piece, and knows its pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import xxhash

from hf_pipetransformer.comm.staging import KnownMask, pinned
from hf_pipetransformer.comm.transfers import sendable
from hf_pipetransformer.data.flattened import Sequences, assign_sequences, find_sequences, num_left_out
from hf_pipetransformer.data.row_table import bytes_of, words_of


_SAMPLES, _NUM_LAYERS, _DIGESTS, _STAMP, _HIDDEN = (
    f"pipetransformer_{name}" for name in ("samples", "num_layers", "digests", "stamp", "hidden")
)
IGNORED_LABEL = -100
MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")
"""Usual names of what the embeddings read. Text comes first: images beside it need not have a row a sample."""
_UP_TO_THE_END = ("attention_mask",)
"""Entries of which a token slice needs all tokens up to its own end."""


@sendable
class SampleBatch(dict[str, Any]):
    """Batch that knows how its samples lie in it; Trainer and models take it as the dict that it is.

    Args:
        rows: number of rows of a sample.
        sequences: those of a flattened batch; None for a batch with rows of its own for each sample.
        pieces: number of samples, and entries that cannot be cut, of each piece that was collated by itself.
    """

    def __init__(
        self,
        inputs: Any = (),
        rows: int = 1,
        sequences: Sequences | None = None,
        pieces: Sequence[tuple[int, Mapping[str, Any]]] = (),
    ) -> None:
        super().__init__(inputs)
        self.rows, self.sequences, self.pieces = rows, sequences, pieces

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> SampleBatch:
        """Return a batch as it is, and one of which nothing is known as one of a row a sample."""
        return inputs if isinstance(inputs, SampleBatch) else cls(inputs)

    def like(self, inputs: Mapping[str, Any]) -> SampleBatch:
        """Return other entries of the same samples."""
        return SampleBatch(inputs, self.rows, self.sequences, self.pieces)

    def __or__(self, inputs: Mapping[str, Any]) -> SampleBatch:  # type: ignore[override]
        return self.like({**self, **inputs})

    def changed(self, call: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> SampleBatch:
        """Return the batch with `call` applied to its entries, and to those that its pieces have for themselves."""
        pieces = [(num_samples, call(own)) for num_samples, own in self.pieces]
        return SampleBatch(call(self), self.rows, self.sequences, pieces)

    def mapped(self, call: Callable[[torch.Tensor], torch.Tensor]) -> SampleBatch:
        """Return the batch with `call` applied to its tensors."""
        return self.changed(
            lambda own: {key: call(each) if isinstance(each, torch.Tensor) else each for key, each in own.items()}
        )

    def with_placeholders(self, names: Collection[str]) -> SampleBatch:
        """Return the batch with tensors of these names replaced by such of their form without storage behind them."""

        def sent(key: str, value: Any) -> Any:
            is_placeholder = key in names and isinstance(value, torch.Tensor)
            return value.new_zeros(1).expand(value.shape) if is_placeholder else value

        return self.changed(lambda own: {key: sent(key, value) for key, value in own.items()})

    @property
    def names(self) -> set[str]:
        """Names of the entries, and of those that its pieces have for themselves."""
        return {*self}.union(*(own for _, own in self.pieces))

    @property
    def main_length(self) -> int:
        """First dimension of the main input; of most tensors, if the main input has a name of its own."""
        found = {name: len(value) for name, value in self.items() if isinstance(value, torch.Tensor) and value.dim()}
        of_main = [found[name] for name in MAIN_INPUTS if name in found]
        # Entries without a row a sample, such as the tiles of images, are outnumbered as a rule.
        return next(iter([*of_main, *(rows for rows, _ in Counter(found.values()).most_common(1))]), 0)

    @property
    def size(self) -> int:
        """Number of samples; 0 for an empty batch."""
        return self.main_length // self.rows if self.sequences is None else self.sequences.num_samples

    @property
    def num_rows(self) -> int:
        """Number of parts that `take_rows` knows: samples, or the sequences of a flattened batch."""
        return self.size if self.sequences is None else len(self.sequences)


@dataclass(frozen=True)
class CacheTags:
    """Tags of a batch's or micro-batch's samples for the activation cache.

    Args:
        samples: index of each sample in the data set, `(batch,)`, int64.
        num_layers: number of layers whose output is known for each sample, `(batch,)`, int64; 0: computed from its
            input.
        digests: hash of each sample's input, `(batch, 2)`, int64.
        stamp: the cache's version number of the weights that `num_layers` refers to.
        hidden: stored activations, `(batch, seq, hidden)`, on the stage that reads them; rows with 0 layers are
            unused. None on later stages, and if nothing is stored.
    """

    samples: torch.Tensor
    num_layers: torch.Tensor
    digests: torch.Tensor
    stamp: int
    hidden: torch.Tensor | None

    def attach(self, batch: SampleBatch) -> SampleBatch:
        """Return the batch with these tags as entries, so they are cut, padded and sent with it."""
        # One for each sample, because entries are cut by samples.
        stamps = torch.full_like(self.samples, self.stamp)
        own = {_SAMPLES: self.samples, _NUM_LAYERS: self.num_layers, _DIGESTS: self.digests, _STAMP: stamps}
        return batch | own | ({} if self.hidden is None else {_HIDDEN: self.hidden})


def detach_tags(batch: Mapping[str, Any]) -> tuple[SampleBatch, CacheTags | None]:
    """Split a batch into the model's inputs and its tags; None for a batch without tags."""
    inputs = SampleBatch.of(batch).like(batch)
    about = [inputs.pop(key, None) for key in (_SAMPLES, _NUM_LAYERS, _DIGESTS, _STAMP)]
    hidden = inputs.pop(_HIDDEN, None)
    if any(values is None for values in about):
        return inputs, None
    # In evaluation Trainer moves whole batches to the device, but the cache needs its tags on the CPU.
    samples, num_layers, digests, stamps = (values.cpu() for values in about)
    return inputs, CacheTags(samples, num_layers, digests, int(stamps[0]), hidden)


def without_hidden(batch: SampleBatch) -> SampleBatch:
    """Return the batch for the later stages, which get stored activations through the pipeline."""
    return batch.like({key: value for key, value in batch.items() if key != _HIDDEN})


def note_samples(batch: Any, num_samples: int | None, rows: int = 1) -> Any:
    """Return a batch of `num_samples` samples as a `SampleBatch`, after a look at how they lie in it.

    Args:
        num_samples: None for a batch of a user's own loader, which does not tell it.
        rows: number of rows of a sample that the trainer's batches have.

    Raises:
        ValueError: the batch has another number of rows.
    """
    if not isinstance(batch, Mapping):
        return batch
    if rows == 1:
        return SampleBatch(batch, rows, find_sequences(batch, num_samples or 1))
    noted = SampleBatch(batch, rows)
    found = noted.main_length
    if found % rows or num_samples not in (None, found // rows):
        raise ValueError(
            f"{'Some' if num_samples is None else num_samples} pairs of texts gave a batch of {found} rows: expected "
            f"{rows} rows a pair, first all chosen texts, then all rejected ones, as the trainer's own collator gives "
            "them."
        )
    return noted


def batch_size(inputs: Mapping[str, Any]) -> int:
    """Return the number of samples; 0 for an empty batch."""
    return SampleBatch.of(inputs).size


def even_bounds(size: int, num_parts: int) -> list[int]:
    """Return where at most `num_parts` parts of `size` samples begin, and where the last one ends; none is empty."""
    count = min(num_parts, size)
    # Rounded down one by one: no two sizes differ by more than a sample, without a remainder to deal out.
    return [size * i // count for i in range(count + 1)]


def split_batch(inputs: Mapping[str, Any], num_microbatches: int) -> list[SampleBatch]:
    """Split a batch by samples into at most `num_microbatches` parts of nearly equal size.

    Sizes differ by at most one sample, and none is 0. Entries without a sample dimension go to every micro-batch. A
    flattened batch is cut between its sequences, see `assign_sequences`; one in pieces, into these.
    """
    batch = SampleBatch.of(inputs)
    if batch.pieces:
        return list(_in_pieces(batch))
    if batch.sequences is not None:
        parts = [take_sequences(batch, part) for part in assign_sequences(batch.sequences.lengths, num_microbatches)]
        # Copies of pinned tensors are not pinned, and the host would wait for the device to take them.
        is_pinned = any(isinstance(value, torch.Tensor) and value.is_pinned() for value in batch.values())
        return [SampleBatch(pinned(part) if is_pinned else part) for part in parts]
    size = batch.size
    if size == 0:
        return []
    return [take_samples(batch, slice(*each)) for each in pairwise(even_bounds(size, num_microbatches))]


def pads_on_left(batch: Mapping[str, Any]) -> bool:
    """Return True if texts of a batch begin at different tokens, and all end at its last one."""
    mask = batch.get(MASK)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return False
    return bool(mask[:, -1].all()) and not bool(mask[:, 0].all())


def join_pieces(rule: CommonLength, pieces: Sequence[Mapping[str, Any]]) -> SampleBatch:
    """Return pieces of a batch, each collated by itself, as one batch that knows them.

    Entries of tokens, `(batch, seq, ...)`, are padded to the longest piece and joined: what counts labels or gathers
    them sees the whole batch. All others stay with their piece.
    """
    main_input, pad_token_id = rule.main_input, rule.pad_token_id
    length = max(sequence_length(piece, main_input) for piece in pieces)
    # Pieces of one row do not show it.
    on_left = rule.on_left or any(map(pads_on_left, pieces))
    padded = [pad_batch(piece, main_input, length, pad_token_id, on_left=on_left) for piece in pieces]
    shapes = [piece[main_input].shape[:2] for piece in padded]

    def is_of_tokens(name: str) -> bool:
        values = [piece.get(name) for piece in padded]
        pairs = zip(values, shapes, strict=True)
        return all(isinstance(value, torch.Tensor) and value.shape[:2] == shape for value, shape in pairs)

    joined = {name: torch.cat([piece[name] for piece in padded]) for name in padded[0] if is_of_tokens(name)}
    own = [{name: value for name, value in piece.items() if name not in joined} for piece in padded]
    return SampleBatch(joined, pieces=[(shape[0], each) for shape, each in zip(shapes, own, strict=True)])


def _in_pieces(batch: SampleBatch) -> Iterator[SampleBatch]:
    start = 0
    for num_samples, own in batch.pieces:
        rows = slice(start, start := start + num_samples)
        taken = {name: value[rows] if has_samples(value, batch.size) else value for name, value in batch.items()}
        yield SampleBatch({**taken, **own})


def take_samples(inputs: Mapping[str, Any], where: slice) -> SampleBatch:
    """Return the samples at `where`, or as large a share of the sequences of a flattened batch."""
    batch = SampleBatch.of(inputs)
    size, sequences = batch.size, batch.sequences
    if sequences is not None:
        start, stop, _ = where.indices(size)
        # By share, because a sample may have several sequences in the row.
        which = range(len(sequences) * start // size, len(sequences) * stop // size)
        return take_sequences(batch, which, stop - start) if which else SampleBatch()
    if batch.rows > 1:
        return take_rows(batch, torch.arange(size)[where])
    return SampleBatch({key: value[where] if has_samples(value, size) else value for key, value in batch.items()})


def take_sequences(batch: SampleBatch, which: Sequence[int], num_samples: int | None = None) -> SampleBatch:
    """Return the sequences `which` of a flattened batch, in this order; see `Sequences.take`."""
    assert batch.sequences is not None, "the batch is flattened"
    inputs, sequences = batch.sequences.take(batch, which, num_samples)
    return SampleBatch(inputs, sequences=sequences)


def first_tokens(batch: SampleBatch, num_tokens: int) -> SampleBatch:
    """Return the first tokens of a flattened batch, whose last sequence may end early."""
    own = batch.sequences
    assert own is not None, "the batch is flattened"
    bounds = (*(start for start in own.bounds if start < num_tokens), num_tokens)
    cut = Sequences((*bounds, own.bounds[-1]) if num_tokens < own.bounds[-1] else bounds, own.num_samples)
    return take_sequences(SampleBatch(batch, sequences=cut), range(len(bounds) - 1))


def cut_tokens(inputs: Mapping[str, Any], bounds: Sequence[int]) -> list[dict[str, Any]]:
    """Cut a batch whose sequences have `bounds[-1]` tokens into token slices; none without bounds.

    Tensors `(batch, seq, ...)` are cut; of an attention mask, each slice gets all tokens up to its own end.

    Raises:
        ValueError: the attention mask is not `(batch, seq)`, or rows are packed from several texts, which models tell
            apart only by position ids in whole rows.
    """
    if not bounds:
        return []
    length = bounds[-1]
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() != 2:
        raise ValueError(
            f"Token slices need an attention_mask of shape (batch, seq), found {tuple(mask.shape)}: let the data "
            "collator give one, or set pipeline_schedule='1f1b'."
        )

    positions = inputs.get("position_ids")
    if mask is None and isinstance(positions, torch.Tensor) and bool((positions.diff() != 1).any()):
        raise ValueError(
            "Token slices need rows of one text each, found position_ids that begin again without an attention_mask: "
            "set pipeline_schedule='1f1b' for packed rows."
        )

    def part(name: str, value: Any, start: int, stop: int) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != length:
            return value
        own = value[:, 0 if name in _UP_TO_THE_END else start : stop]
        # Transformers' losses flatten labels with `view`, which needs contiguous memory.
        return own.contiguous() if name in ("labels", "shift_labels") else own

    whole, labels = dict(inputs), inputs.get("labels")
    if isinstance(labels, torch.Tensor) and "shift_labels" not in inputs:
        # The last token of a slice predicts the first token of the next slice.
        whole["shift_labels"] = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)
    return [
        {name: part(name, value, start, stop) for name, value in whole.items()} for start, stop in pairwise(bounds)
    ]


def take_rows(inputs: Mapping[str, Any], rows: torch.Tensor) -> SampleBatch:
    """Return the samples of a batch, or sequences of a flattened one, at the positions `rows`, `(n,)`, int64."""
    batch = SampleBatch.of(inputs)
    if batch.sequences is not None:
        return take_sequences(batch, rows.tolist())
    size = batch.size
    of_blocks = torch.cat([rows + size * block for block in range(batch.rows)])

    def taken(value: Any) -> Any:
        if not has_samples(value, size) and not has_samples(value, size * batch.rows):
            return value
        own = rows if has_samples(value, size) else of_blocks
        if isinstance(value, torch.Tensor):
            # The host goes on while the positions travel; what reads them is queued behind.
            there = own.to(value.device, non_blocking=True)
            return value.rows(own, there) if isinstance(value, KnownMask) else value[there]
        return [value[int(row)] for row in own]

    return batch.like({key: taken(value) for key, value in batch.items()})


def has_samples(value: Any, size: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and value.shape[0] == size
    return isinstance(value, (list, tuple)) and len(value) == size


def count_items(inputs: Mapping[str, Any], shifts_labels: bool = False) -> int:
    """Count the items that the mean of the model's own loss runs over.

    Class labels count unless ignored (-100), float targets count by element, question answering counts answers inside
    the sequence, and a batch without labels counts its samples.

    Args:
        shifts_labels: the loss predicts the next token, so position 0 is never a target.
    """
    labels = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        if labels is not None and shifts_labels:
            labels = labels[..., 1:]
    if isinstance(labels, torch.Tensor):
        return labels.numel() if labels.is_floating_point() else int((labels != IGNORED_LABEL).sum())
    positions, tokens = inputs.get("start_positions"), inputs.get("input_ids")
    if isinstance(positions, torch.Tensor) and isinstance(tokens, torch.Tensor):
        # Models clamp an answer beyond the sequence to its length, which their loss ignores.
        return int((positions < tokens.shape[1]).sum())
    return batch_size(inputs)


def join_outputs(
    outputs: Sequence[Any], weights: Sequence[float], join: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat
) -> Any:
    """Join the outputs of micro-batches: tensors with `join`, scalars as their sum with `weights`."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if first.dim() == 0:
            # A part without a label has a loss of nan (0 / 0), and 0 times nan is nan: such parts are left out.
            terms = [output * weight for output, weight in zip(outputs, weights, strict=True) if weight]
            return torch.stack(terms).sum() if terms else first * 0
        return join(list(outputs))
    if isinstance(first, Mapping):
        return type(first)(**{key: join_outputs([output[key] for output in outputs], weights, join) for key in first})
    if isinstance(first, (list, tuple)):
        return type(first)(join_outputs(parts, weights, join) for parts in zip(*outputs, strict=True))
    return first


def are_of_samples(outputs: Sequence[Any], sizes: Sequence[int], rows: int = 1) -> bool:
    """Return True if parts of a batch gave nothing but losses and tensors with a value, or `rows`, for each sample.

    Args:
        sizes: samples of each part.
        rows: of a sample.
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        lengths = [len(each) if each.dim() else None for each in outputs]
        is_alike = len({each.shape[1:] for each in outputs}) == 1
        return is_alike and lengths in ([*sizes], [size * rows for size in sizes])
    if isinstance(first, Mapping):
        return all(are_of_samples([each[key] for each in outputs], sizes, rows) for key in first if key != "loss")
    if isinstance(first, (list, tuple)):
        return all(are_of_samples(parts, sizes, rows) for parts in zip(*outputs, strict=True))
    return True


@dataclass(frozen=True)
class Axis:
    """Dimension along which parts of a batch are joined.

    Args:
        places: positions of the joined rows in the whole batch; None if the parts follow each other there.
        lengths: of the parts.
    """

    dim: int = 0
    places: torch.Tensor | None = None
    lengths: Sequence[int] = ()

    @classmethod
    def of(cls, batch: SampleBatch, sizes: Sequence[int]) -> Axis:
        """Return how activations of parts of `sizes` samples lie in that of the whole batch."""
        if batch.sequences is not None:
            parts = [batch.sequences.tokens(part) for part in assign_sequences(batch.sequences.lengths, len(sizes))]
            return cls(1, torch.cat(parts), list(map(len, parts)))
        if batch.rows == 1:
            return cls()
        # Rows of a sample lie in blocks: first one of every sample, then the next one of each.
        ends, total = pairwise(accumulate(sizes, initial=0)), sum(sizes)
        places = torch.cat([torch.arange(*each) + total * row for each in ends for row in range(batch.rows)])
        return cls(0, places, [size * batch.rows for size in sizes])

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        # `argsort` inverts the order in which the parts lie.
        whole, places = torch.cat(list(parts), self.dim), self.places
        return whole if places is None else whole.index_select(self.dim, places.argsort().to(whole.device))

    def cut(self, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Cut what belongs to the whole batch as `parts` lie in it."""
        if self.places is not None:
            whole = whole.index_select(self.dim, self.places.to(whole.device))
        return list(whole.split([part.shape[self.dim] for part in parts], self.dim))

    def joined(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join outputs: of rows or of samples; of a flattened batch `(1, tokens, ...)`.

        Outputs `(1, tokens - 1, ...)` are those of a next-token loss, which is zero where the next token is of another
        sequence.

        Raises:
            ValueError: a flattened batch has outputs of other shapes.
        """
        if self.dim == 0:
            is_of_rows = [len(output) for output in outputs] == self.lengths
            return self.join(outputs) if is_of_rows else torch.cat(list(outputs))
        missing = num_left_out([output.shape for output in outputs], self.lengths)
        # What each part lacks is the value of its last token, zero in the whole row, which lacks that of its own last.
        full = [torch.cat([each, each.new_zeros(1, missing, *each.shape[2:])], dim=1) for each in outputs]
        return self.join(full)[:, : sum(self.lengths) - missing]


def sequence_length(batch: Mapping[str, Any], main_input: str) -> int:
    """Return the padded length of a batch of text; 0 for an empty one, or one without a second dimension."""
    value = batch.get(main_input)
    return value.shape[1] if isinstance(value, torch.Tensor) and value.dim() > 1 else 0


@dataclass(frozen=True)
class CommonLength:
    """Rule for padding the batches of all replicas, or their pieces, to one length.

    `main_input` names the token ids, `(batch, seq)`; with `on_left` the collator is known to pad there.
    """

    main_input: str
    pad_token_id: int
    on_left: bool = False


def fill_value(key: str, main_input: str, pad_token_id: int) -> int:
    """Return the padding of a batch entry: the padding token for the main input, -100 for labels, else zero."""
    return pad_token_id if key == main_input else IGNORED_LABEL if key == "labels" else 0


def pad_batch(
    batch: Mapping[str, Any],
    main_input: str,
    length: int,
    pad_token_id: int,
    on_left: bool = False,
) -> SampleBatch:
    """Pad every `(batch, seq, ...)` tensor of a batch, on the right unless told otherwise, to `(batch, length, ...)`.

    Padding matches a collator that saw the whole global batch: see `fill_value`.
    """
    current = sequence_length(batch, main_input)
    if current in (0, length):
        return SampleBatch.of(batch)
    # Patches may be as wide as a text is long, but there are more of them than texts.
    shape = batch[main_input].shape[:2]

    def padded(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape[:2] != shape:
            return value
        fill = fill_value(key, main_input, pad_token_id)
        more = value.new_full((value.shape[0], length - current, *value.shape[2:]), fill)
        return torch.cat([more, value] if on_left else [value, more], dim=1)

    return SampleBatch.of(batch).like({key: padded(key, value) for key, value in batch.items()})


# ---- lengths and digests of samples, by which stored activations are found again ----


MASK = "attention_mask"


def real_lengths(batch: Mapping[str, Any], main_input: str = "input_ids") -> np.ndarray:
    """Return the number of tokens per sample, `(batch,)`, up to the last one that the attention mask shows.

    Without a 2-D mask, every sample has the full length of the main input; without a token dimension, 0.
    """
    mask, value = batch.get(MASK), batch.get(main_input)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return shown_lengths(mask)
    if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
        return np.full(value.shape[0], value.shape[1])
    return np.zeros(SampleBatch.of(batch).main_length, dtype=np.int64)


def shown_lengths(mask: torch.Tensor) -> np.ndarray:
    """Return the position behind the last one that each row of a mask `(batch, seq)` shows, `(batch,)`; 0 for none."""
    shown = (mask.detach().cpu() != 0).numpy()
    return np.where(shown.any(axis=1), shown.shape[1] - np.argmax(shown[:, ::-1], axis=1), 0)


def sample_digests(batch: Mapping[str, Any], lengths: np.ndarray, main_input: str, pad_token_id: int) -> np.ndarray:
    """Return a 128-bit hash of the tensors of a sample in two words, `(batch, 2)`, whatever else is in the batch.

    Of values of tokens, padding behind the real lengths `(batch,)` does not count.
    """
    hashers, positions = [xxhash.xxh3_128() for _ in lengths], batch[main_input].shape[:2]
    # By name, because the order of the entries is no part of a sample.
    for name, value in sorted(batch.items()):
        is_of_tokens = value.dim() > 1 and value.shape[:2] == positions and not batch[main_input].is_floating_point()
        ends = [None] * len(lengths)
        if is_of_tokens:
            is_beyond = torch.arange(value.shape[1]) >= torch.from_numpy(lengths)[:, None]
            is_fill = value.cpu() == fill_value(name, main_input, pad_token_id)
            is_padding = is_fill.reshape(*positions, -1).all(-1)
            are_padded = (is_padding | ~is_beyond).all(1).tolist()
            ends = [end if is_cut else None for end, is_cut in zip(lengths.tolist(), are_padded, strict=True)]
        data = bytes_of(value).reshape(len(value), value.shape[1] if is_of_tokens else 1, -1)
        for hasher, content, end in zip(hashers, data, ends, strict=True):
            # With the shape, as tensors of other dtypes or shapes can have the same bytes.
            shape = (*content[:end].shape[:1], *value.shape[2:]) if is_of_tokens else tuple(value.shape[1:])
            hasher.update(f"{name}\0{value.dtype}\0{shape}\0".encode())
            hasher.update(np.ascontiguousarray(content[:end]).data)
    return words_of(hashers)
