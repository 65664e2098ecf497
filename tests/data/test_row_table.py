"""The table of rows that a loader has read: what it gives back, from which pass on, and when it gives nothing."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hf_pipetransformer.data.row_table import (
    MANY_BYTES,
    ROWS,
    Field,
    RowTable,
    condition_of,
    digests_of_rows,
    table_reads,
)


def batch_of(indices: np.ndarray, **fields: torch.Tensor) -> dict[str, torch.Tensor]:
    numbers = torch.from_numpy(indices)
    pixels = numbers[:, None, None] + torch.arange(2.0 * MANY_BYTES).reshape(1, 2, -1)
    return {"pixels": pixels, "labels": numbers, **fields}


def known_after(passes: int, table: RowTable, batch: Any = batch_of) -> Any:
    everything = np.arange(6)
    for _ in range(passes):
        table.note(everything, batch(everything))
        table.end_pass(serves=True)
    return table.known([4, 1])


def test_rows_are_known_after_two_passes() -> None:
    table = RowTable(6)
    assert known_after(1, table) is None
    found = known_after(1, table)
    assert list(found) == ["pixels", "labels", ROWS]
    assert found["pixels"] == Field("pixels", (2, MANY_BYTES), "float32")
    assert torch.equal(found["labels"], torch.tensor([4, 1]))
    expected = digests_of_rows(batch_of(np.array([4, 1]))["pixels"])
    np.testing.assert_array_equal(found[ROWS].digests["pixels"], expected)
    assert found[ROWS].indices.tolist() == [4, 1]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_small_fields_come_back_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = (torch.randn(6, *shape) * 3).to(dtype)
    found = known_after(2, RowTable(6), lambda indices: batch_of(indices, other=values))
    assert torch.equal(found["other"], values[[4, 1]]) and found["other"].dtype == dtype


def test_all_is_read_until_the_end_of_a_pass() -> None:
    table = RowTable(6)
    assert known_after(2, table) is not None
    table.read_all()
    assert table.known([4]) is None
    table.end_pass(serves=True)
    assert table.known([4]) is not None


def test_a_row_that_was_not_read_twice_is_not_known() -> None:
    table = RowTable(7)
    assert known_after(2, table) is not None
    assert table.known([1, 6]) is None


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (lambda indices: [batch_of(indices)], "batches are of class list"),
        (lambda indices: {**batch_of(indices), "sizes": torch.ones(2, 3)}, "field 'sizes' has no row"),
        (lambda indices: {**batch_of(indices), "names": ["a"] * 6}, "field 'names' has no row"),
        (lambda indices: {"labels": batch_of(indices)["labels"]}, "no field of theirs has many bytes"),
        (
            lambda indices: batch_of(indices, a=torch.ones(6, 3000, dtype=torch.int8), b=torch.ones(6, 300)),
            "labels and other small fields of theirs have too many bytes",
        ),
        (lambda indices: batch_of(indices, noise=torch.randn(6)), "not the same when they are read again"),
        (
            lambda indices: batch_of(indices, pixels=torch.randn(6, MANY_BYTES)),
            "not the same when they are read again",
        ),
    ],
    ids=["list", "no rows", "texts", "small", "too many", "random", "random pixels"],
)
def test_why_rows_are_not_known(batch: Any, reason: str) -> None:
    table = RowTable(6)
    assert known_after(2, table, batch) is None
    assert reason in str(table.why_off)
    table.switch_off("another reason")
    assert reason in str(table.why_off)
    assert table.note(np.arange(6), batch(np.arange(6))) is None


def test_batches_of_other_shapes() -> None:
    table = RowTable(6)
    table.note(np.arange(3), batch_of(np.arange(3)))
    assert table.note(np.arange(3), batch_of(np.arange(3), pixels=torch.ones(3, 2 * MANY_BYTES))) is None
    assert "fields have other shapes in other batches" in str(table.why_off)


class Numbers(Dataset[Any]):
    hidden = "known by the script"

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: value[0] for name, value in batch_of(np.array([index])).items()}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Numbers())


def test_what_a_loader_reads_and_gives() -> None:
    seen: list[Any] = []

    def complete(_reads: Any, batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(batch.pop(ROWS).indices.tolist())
        return batch

    loader: Any = DataLoader(Numbers(), batch_size=4)
    assert table_reads(loader, complete) is not None
    assert len(loader) == 2 and loader.dataset.hidden == "known by the script"
    assert loader.dataset[3]["labels"] == 3
    for own, plain in zip(loader, DataLoader(Numbers(), batch_size=4), strict=True):
        assert all(torch.equal(own[name], plain[name]) for name in ("pixels", "labels"))
    assert seen == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(Stream(), batch_size=2),
        lambda: DataLoader(Numbers(), batch_size=None),
        lambda: DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="spawn"),
        lambda: [1, 2],
    ],
    ids=["a stream", "no batches", "spawned workers", "no loader"],
)
def test_loaders_that_have_no_table(loader: Any) -> None:
    assert table_reads(loader(), lambda _, batch: batch) is None


def test_reading_that_draws_random_numbers_switches_the_table_off() -> None:
    class Drawn(Numbers):
        def __getitem__(self, index: int) -> dict[str, Any]:
            torch.rand(1)
            return super().__getitem__(index)

    loader: Any = DataLoader(Drawn(), batch_size=3)
    table = table_reads(loader, lambda _, batch: batch)
    assert table is not None and len(list(loader)) == 2
    assert "reading them draws random numbers" in str(table.why_off)


def test_without_memory_there_is_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise OSError("no memory")

    monkeypatch.setattr(mmap, "mmap", none)
    assert table_reads(DataLoader(Numbers(), batch_size=2), lambda _, batch: batch) is None


@pytest.mark.parametrize("indices", [["a", "b"], [(0, 1)], [0, 6], [-1, 2]], ids=str)
def test_samples_that_are_not_read_by_number(indices: list[Any]) -> None:
    class Named(Numbers):
        def __getitem__(self, index: Any) -> dict[str, Any]:
            return super().__getitem__(1)

    loader: Any = DataLoader(Named(), batch_sampler=[indices] * 2)
    table = table_reads(loader, lambda _, batch: batch)
    assert table is not None and len(list(loader)) == 2
    assert "they are not read by number" in str(table.why_off)


def test_long_names_of_fields() -> None:
    table = RowTable(6)
    name = "\N{SNOWMAN}" * 30_000
    assert known_after(2, table, lambda indices: {name: batch_of(indices)["pixels"]}) is None
    table = RowTable(6)
    assert known_after(2, table, lambda indices: {**batch_of(indices), name: 1}) is None
    assert table.why_off is not None and "has no row" not in table.why_off


class Holds(Dataset[Any]):
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def method(self) -> None: ...


@pytest.mark.parametrize(
    ("change", "is_seen"),
    [
        (lambda data: setattr(data, "epoch", 2), True),
        (lambda data: setattr(data, "epoch", 1), False),
        (lambda data: setattr(data, "name", "other"), True),
        (lambda data: setattr(data.inner, "epoch", 5), True),
        (lambda data: data.short.append(3), True),
        (lambda data: data.short.__setitem__(0, 7), True),
        (lambda data: data.table.update(a=1), True),
        (lambda data: data.long.append(3), True),
        (lambda data: setattr(data, "long", list(data.long)), True),
        (lambda data: data.__getattribute__("epoch"), False),
    ],
)
def test_a_data_set_in_another_state_is_seen(change: Any, is_seen: bool) -> None:
    data = Holds(epoch=1, name="x", inner=Holds(epoch=1), short=[1, 2], long=list(range(1000)), table={"a": 0})
    data.itself = data
    before = condition_of(data), condition_of(data.method)
    change(data)
    after = condition_of(data), condition_of(data.method)
    assert [one != other for one, other in zip(before, after, strict=True)] == [is_seen] * 2


def test_a_data_set_in_another_state_is_read_for_a_pass() -> None:
    table = RowTable(6)
    for state, serves in ((1, False), (1, True), (1, True), (2, False), (2, True)):
        table.begin_pass(state)
        assert table.serves == serves
        table.end_pass(serves=True)
