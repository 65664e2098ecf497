"""Samples, micro-batches, item counts and messages: the pure parts of the data path."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers.trainer_utils import has_length

from hf_pipetransformer.comm.topology import PipelineGroups
from hf_pipetransformer.comm.transfers import pack, unpack
from hf_pipetransformer.data.batches import (
    Axis,
    SampleBatch,
    batch_size,
    count_items,
    join_outputs,
    note_samples,
    pad_batch,
    sequence_length,
    split_batch,
    take_rows,
)
from hf_pipetransformer.data.flattened import Sequences
from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.data.node_shares import replica_slice
from hf_pipetransformer.data.reading import PipelineLink, Share, StreamReading
from hf_pipetransformer.data.rng import SharedRngState, States, random_state
from hf_pipetransformer.data.sampler import EpochOrder, Position, ReplicaBatchSampler, Samples


@given(st.integers(0, 40), st.integers(1, 9))
def test_replicas_share_a_batch_without_gap_or_double(num_samples: int, num_replicas: int) -> None:
    parts = [range(num_samples)[replica_slice(num_samples, r, num_replicas)] for r in range(num_replicas)]
    assert [sample for part in parts for sample in part] == list(range(num_samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_small_evaluation_batch_goes_whole_to_every_replica() -> None:
    batches = [[0, 1, 2, 3], [4]]
    assert list(ReplicaBatchSampler(EpochOrder(batches), 1, 2, repeat_small=True)) == [[2, 3], [4]]
    assert list(ReplicaBatchSampler(EpochOrder(batches), 1, 2)) == [[2, 3], []]


def test_a_data_set_is_not_asked_for_nothing() -> None:
    """A transform of the user's would get columns of no rows."""

    def transform(rows: dict[str, list[Any]]) -> dict[str, Any]:
        return {"x": torch.stack([torch.tensor(value) for value in rows["x"]])}

    samples = Samples(datasets.Dataset.from_dict({"x": [1.0, 2.0, 3.0]}).with_transform(transform))
    assert samples.__getitems__([]) == []
    assert [float(row["x"]) for row in samples.__getitems__([2, 0])] == [3.0, 1.0]
    assert Samples([5, 6]).__getitems__([1]) == [6]


def test_a_sample_that_comes_twice_in_an_epoch_has_no_record() -> None:
    once, twice = (ReplicaBatchSampler(EpochOrder(batches), 0, 1) for batches in ([[0, 1], [2]], [[0, 1], [0]]))
    assert list(once) == [[0, 1], [2]] and list(twice) == [[0, 1], [0]]
    assert [batch.is_single for batch in (*once.unread, *twice.unread)] == [True, True, False, False]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 3))
def test_parts_of_a_batch_hold_all_rows_of_their_samples(size: int, num_parts: int, rows: int) -> None:
    """Row `r` of sample `i` is number `r * size + i`."""
    numbers = torch.arange(rows * size)
    given_rows = {"input_ids": numbers[:, None], "margin": numbers[:size], "names": list(range(size))}
    whole = note_samples(given_rows, size, rows)
    assert (whole.size, whole.rows, count_items(whole)) == (size, rows, size)
    parts = split_batch(whole, num_parts)
    for part in parts:
        samples = (part["input_ids"] % size).reshape(rows, -1)
        assert all(torch.equal(block, part["margin"]) for block in samples)
        assert part["names"] == part["margin"].tolist()
        assert batch_size(part) == len(part["margin"])
    join = Axis.of(whole, list(map(batch_size, parts))).joined
    for name in ("input_ids", "margin"):
        joined = join_outputs([part[name] for part in parts], [1.0] * len(parts), join)
        assert torch.equal(joined, whole[name])
    last = take_rows(whole, torch.tensor([size - 1, size - 1]))
    assert (last["input_ids"] % size).flatten().tolist() == [size - 1] * 2 * rows
    assert set(last) == {"input_ids", "margin", "names"}


def test_a_batch_of_pairs_has_two_rows_for_each() -> None:
    with pytest.raises(ValueError, match="3 pairs of texts gave a batch of 5 rows: expected 2 rows a pair"):
        note_samples({"input_ids": torch.zeros(5, 4)}, 3, rows=2)
    with pytest.raises(ValueError, match="Some pairs of texts gave a batch of 5 rows: expected 2 rows a pair"):
        note_samples({"input_ids": torch.zeros(5, 4)}, None, rows=2)
    of_loader = note_samples({"margin": torch.zeros(3), "input_ids": torch.zeros(6, 4)}, None, rows=2)
    assert (of_loader.size, of_loader.rows) == (3, 2)


def test_a_batch_knows_how_its_samples_lie_wherever_it_goes() -> None:
    """To another process, as a message or from a worker of a loader, and with other entries."""
    sequences = Sequences((0, 2, 6), 2)
    for batch in (SampleBatch({"x": torch.arange(6)}, rows=2), SampleBatch({"x": torch.ones(1, 6)}, 1, sequences)):
        sent = unpack(pack([Share(batch, 3, True), {"first": batch}]))
        copies = [sent[0].batch, sent[1]["first"], pickle.loads(pickle.dumps(batch)), copy.copy(batch)]
        for found in (*copies, batch | {"y": 1}, batch.mapped(torch.Tensor.double)):
            assert type(found) is SampleBatch and (found.rows, found.sequences) == (batch.rows, batch.sequences)
            assert torch.equal(found["x"].double(), batch["x"].double())
        assert (type(sent[0]), sent[0].size, sent[0].is_last) == (Share, 3, True)
    assert (batch | {"y": 1})["y"] == 1 and "y" not in batch


@pytest.mark.parametrize(
    "inputs",
    [
        {"class_weights": torch.ones(4), "input_ids": torch.ones(6, 3), "labels": torch.ones(6)},
        {"pixel_values": torch.ones(9, 2), "image_grid": torch.ones(9, 3), "input_ids": torch.ones(6, 3)},
        {"edges": torch.ones(9, 2), "nodes": torch.ones(6, 3), "labels": torch.ones(6), "scale": torch.tensor(2.0)},
    ],
)
def test_samples_are_counted_by_the_main_input_wherever_it_stands(inputs: dict[str, Any]) -> None:
    assert batch_size(inputs) == 6
    assert [len(part["labels"]) for part in split_batch(inputs, 3) if "labels" in part] in ([], [2, 2, 2])


@given(st.integers(1, 20), st.integers(1, 25))
def test_micro_batches_keep_order_and_are_even(size: int, num_microbatches: int) -> None:
    inputs = {"x": torch.arange(size), "y": list(range(size)), "scale": torch.tensor(2.0), "flag": True}
    parts = split_batch(inputs, num_microbatches)
    sizes = [batch_size(part) for part in parts]
    assert len(parts) == min(num_microbatches, size)
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([part["x"] for part in parts]), inputs["x"])
    assert [item for part in parts for item in part["y"]] == inputs["y"]
    assert all(part["scale"] is inputs["scale"] and part["flag"] is True for part in parts)


def test_an_empty_batch_has_no_micro_batches() -> None:
    assert split_batch({}, 4) == []


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"labels": torch.tensor([0, 1, -100])}, 2),
        ({"labels": torch.tensor([[0, -100], [-100, -100]])}, 1),
        ({"labels": torch.tensor([0.5, -100.0])}, 2),
        ({"labels": torch.rand(3, 4)}, 12),
        ({"input_ids": torch.zeros(3, 8), "start_positions": torch.tensor([0, 7, 8])}, 2),
        ({"pixel_values": torch.zeros(3, 1)}, 3),
        ({}, 0),
    ],
)
def test_items_that_a_mean_runs_over(inputs: dict[str, torch.Tensor], expected: int) -> None:
    assert count_items(inputs) == expected


def test_items_of_a_loss_that_shifts_labels() -> None:
    assert count_items({"labels": torch.tensor([[1, 2, -100]])}, shifts_labels=True) == 1


def test_outputs_of_micro_batches_are_joined() -> None:
    parts = [
        {"loss": torch.tensor(1.0), "logits": torch.zeros(2, 3), "extra": (torch.ones(2), None)},
        {"loss": torch.tensor(3.0), "logits": torch.ones(1, 3), "extra": (torch.ones(1), None)},
    ]
    joined = join_outputs(parts, [2 / 3, 1 / 3])
    assert joined["loss"].item() == pytest.approx(5 / 3)
    assert joined["logits"].shape == (3, 3)
    assert joined["extra"][0].shape == (3,)
    assert joined["extra"][1] is None


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.text(max_size=5), st.floats(allow_nan=False)
)


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner), max_leaves=8))
def test_plain_trees_survive_a_message(tree: Any) -> None:
    assert unpack(pack(tree)) == tree


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5,), (2, 3, 4)])
def test_tensors_survive_a_message_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    found = unpack(pack({"a": (tensor, [tensor.t() if tensor.dim() == 2 else tensor])}))["a"]
    assert found[0].dtype == dtype
    assert found[0].shape == tensor.shape
    assert torch.equal(found[0], tensor)


def test_a_batch_of_single_numbers_has_no_length() -> None:
    """Tabular data and regressions: the main input is `(batch,)`."""
    batch = {"x": torch.ones(3), "labels": torch.ones(3)}
    assert sequence_length(batch, "x") == 0
    assert pad_batch(batch, "x", 0, 0) == batch


def test_a_placeholder_travels_as_one_element() -> None:
    message = pack({"pixel_values": torch.zeros(1).expand(8, 3, 224, 224)})
    assert message.numel() < 500
    assert unpack(message)["pixel_values"].shape == (8, 3, 224, 224)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match="holds a set"):
        pack({"a": {1, 2}})


# ---- streams ----


class Rows(torch.utils.data.IterableDataset):
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        for row in range(self.num_rows):
            self.num_read += 1
            yield row


ALONE = PipelineGroups(1, 1, 0, 0, (0,), (0,), None, None, None, None)


def loader_over(reader: DataLoader[Any], batch: int, shared: SharedRngState | None) -> PipelineLoader:
    link = PipelineLink(ALONE, frozenset(), 5.0)
    return PipelineLoader(reader.dataset, StreamReading(reader, link, shared, 5.0, is_training=True), batch)


def stream(num_rows: int, batch: int = 4) -> PipelineLoader:
    loader = DataLoader(Rows(num_rows), batch_size=batch, collate_fn=lambda rows: {"x": torch.tensor(rows)})
    return loader_over(loader, batch, None)


@pytest.mark.parametrize("num_rows", [0, 1, 8, 10])
def test_a_stream_is_read_once_to_its_end_and_its_last_batch_is_known(num_rows: int) -> None:
    loader = stream(num_rows)
    for _epoch in range(2):
        loader.dataset.num_read = 0
        seen = [(batch["x"].tolist(), loader.end_of_dataloader, loader.samples_of_replicas()) for batch in loader]
        assert [row for rows, _, _ in seen for row in rows] == list(range(num_rows))
        assert [is_last for _, is_last, _ in seen] == [i == len(seen) - 1 for i in range(len(seen))]
        assert [count for _, _, count in seen] == [[len(rows)] for rows, _, _ in seen]
        assert loader.dataset.num_read == loader.num_seen == num_rows
    assert not has_length(loader)


def test_a_stream_goes_on_where_a_run_was_saved() -> None:
    loader = stream(10, batch=2).starting_at(Position(0, 4, 2, None, None, None, first=2))
    assert [batch["x"].tolist() for batch in loader] == [[4, 5], [6, 7], [8, 9]]
    assert [batch["x"].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def drawing_stream(states: States) -> PipelineLoader:
    loader = DataLoader(Rows(12), batch_size=2, collate_fn=lambda rows: {"x": torch.tensor(rows), "y": torch.rand(2)})
    return loader_over(loader, 2, SharedRngState(states))


def drawn(batches: Iterator[Any], most: int = 100) -> list[Any]:
    return [(batch["x"].tolist(), batch["y"].tolist()) for _, batch in zip(range(most), batches, strict=False)]


@pytest.mark.parametrize("num_read", [3, 5, 6, 7])
@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_batches_that_were_read_ahead_are_drawn_again_by_a_run_that_goes_on(num_read: int, num_ahead: int) -> None:
    first = drawing_stream(random_state())
    first.num_under_way = 3
    batches = iter(first)
    before = drawn(batches, num_read)
    first.num_ahead = num_ahead
    place, states = first.position(0), first.reading.shared.states
    assert place.first == min(num_read, 6) - num_ahead
    expected = before[place.first :] + drawn(batches)
    second = drawing_stream(states).starting_at(place)
    batches = iter(second)
    found = drawn(batches, 1)
    if place.ahead is not None:
        # Saved once more, while some of the batches lie there still.
        assert second.position(0).first == place.first + 1
        third = drawing_stream(second.reading.shared.states).starting_at(second.position(0))
        assert drawn(iter(third)) == expected[1:]
    assert found + drawn(batches) == expected
    assert torch.equal(second.reading.shared.torch_state, first.reading.shared.torch_state)
