"""Rows of a call: what they are known by, alone and among others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from hf_pipetransformer.cache.frozen_parts.values import NotStorableError, Rows, rebuilt, tensors_of


def digests(*args: Any, salt: bytes = b"", **kwargs: Any) -> list[tuple[int, int]]:
    return [tuple(row) for row in Rows.of(args, kwargs).digests(salt).tolist()]


def test_tensors_are_found_and_changed_wherever_they_are() -> None:
    one, other = torch.ones(2), torch.zeros(3)
    value = BaseModelOutput(last_hidden_state=one, hidden_states=(one, {"a": [other, None, 3]}))
    assert [id(each) for each in tensors_of(value)] == [id(one), id(one), id(other)]
    changed = rebuilt(value, lambda tensor: tensor + 1)
    assert isinstance(changed, BaseModelOutput)
    assert changed.hidden_states[1]["a"][0].tolist() == [1, 1, 1] and changed.hidden_states[1]["a"][1:] == [None, 3]
    with pytest.raises(NotStorableError, match="has a DynamicCache among its inputs or outputs, expected tensors"):
        tensors_of((one, DynamicCache()))


def test_a_row_is_known_by_its_own_content_alone() -> None:
    images = torch.randn(4, 3, 5, dtype=torch.float64)
    alone = [digests(image[None])[0] for image in images]
    assert digests(images) == alone
    assert digests(images[[2, 0]]) == [alone[2], alone[0]]
    assert len({*alone}) == 4
    changed = images.clone()
    changed[1, 2, 4] += 1e-9
    assert [one == other for one, other in zip(digests(changed), alone, strict=True)] == [True, False, True, True]


@pytest.mark.parametrize(
    "other",
    [
        {"salt": b"bf16"},
        {"flag": False},
        {"scale": torch.tensor([1.0, 2.0, 3.0])},
        {"mask": torch.tensor([[True], [True]])},
    ],
    ids=str,
)
def test_whatever_else_a_call_gets_makes_other_rows(other: dict[str, Any]) -> None:
    images = torch.randn(2, 3)
    given = {"flag": True, "scale": torch.tensor([1.0, 2.0, 4.0]), "mask": torch.tensor([[True], [False]])}
    first, second = digests(images, **given), digests(images, **{**given, **other})
    assert first[1] != second[1]
    # The first row's mask is the same.
    assert (first[0] == second[0]) == ("mask" in other)
    assert digests(images.float(), **given) != digests(images.half(), **given)
    assert digests(images.view(2, 3, 1)) != digests(images.view(2, 1, 3))


def cut(*args: Any, **kwargs: Any) -> list[tuple[int, int]]:
    return [tuple(row) for row in Rows.of(args, kwargs).digests(b"", cuts_padding=True).tolist()]


def test_padding_makes_no_other_row_where_it_is_cut() -> None:
    ids, mask = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    longer = [torch.nn.functional.pad(each, (0, 4)) for each in (ids, mask)]
    found = cut(ids, attention_mask=mask)
    assert cut(longer[0], attention_mask=longer[1]) == found
    assert cut(ids[1:, :2], attention_mask=mask[1:, :2]) == found[1:]
    # A text's last token belongs to it,
    ends = cut(torch.tensor([[5, 6, 4], [8, 4, 0]]), attention_mask=mask)
    assert [one == other for one, other in zip(ends, found, strict=True)] == [False, False]
    # and what is masked inside it.
    hole = torch.tensor([[1, 0, 1], [1, 1, 0]])
    assert cut(ids, attention_mask=hole)[0] != found[0]
    assert digests(ids, attention_mask=mask) != digests(longer[0], attention_mask=longer[1])


def test_what_goes_on_with_the_tokens_is_cut_with_them() -> None:
    """Masks of pairs of tokens, and positions that all rows have in common."""
    ids, mask = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    pairs = (torch.ones(3, 3).tril().bool() & mask[:, None, None].bool()).contiguous()
    angles = torch.arange(6.0).reshape(1, 3, 2)
    found = cut(ids, attention_mask=mask, pairs=pairs, angles=angles)
    shorter = {"attention_mask": mask[1:, :2], "pairs": pairs[1:, :, :2, :2], "angles": angles[:, :2]}
    assert cut(ids[1:, :2], **shorter) == found[1:]
    changed = angles.clone()
    changed[0, 2] += 1
    other = cut(ids, attention_mask=mask, pairs=pairs, angles=changed)
    assert [one == same for one, same in zip(other, found, strict=True)] == [False, True]


def test_a_tensor_of_the_model_belongs_to_all_rows_whatever_its_size() -> None:
    table = torch.randn(2, 5)
    images = torch.randn(2, 3)

    def rows(images: torch.Tensor, table: torch.Tensor) -> Any:
        return Rows.of((images, table), {}, is_whole=lambda tensor: tensor is table).digests(b"")

    other = table.clone()
    other[1] += 1
    assert (rows(images, table) != rows(images, other)).any(1).all()
    assert rows(images[:1], table).tolist() == rows(images, table)[:1].tolist()


def test_some_rows_are_taken_and_cut() -> None:
    ids, mask = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    rows = Rows.of((ids, "flag"), {"attention_mask": mask, "table": torch.ones(7)})
    assert rows.lengths is not None and rows.lengths.tolist() == [3, 2] and rows.is_padded
    args, kwargs = rows.take(np.array([1]), length=2)
    assert args[0].tolist() == [[8, 9]] and args[1] == "flag"
    assert kwargs["attention_mask"].tolist() == [[1, 1]] and kwargs["table"].shape == (7,)


def test_a_call_without_rows_is_refused() -> None:
    for args in ((), (torch.tensor(1.0),), ("text",)):
        with pytest.raises(NotStorableError, match="takes no tensor with a row for each sample"):
            Rows.of(args, {})


def test_images_that_lie_one_behind_the_other_are_known_by_their_own_patches() -> None:
    grid = torch.tensor([[1, 2, 4], [1, 4, 4]])
    patches = torch.arange(24 * 3, dtype=torch.float32).reshape(24, 3)
    both = Rows.of((patches,), {"grid_thw": grid})
    assert both.number == 2 and both.is_flat and both.length == 16
    alone = Rows.of((patches[8:],), {"grid_thw": grid[1:]})
    assert both.digests(b"")[1].tolist() == alone.digests(b"")[0].tolist()
    # The same patches in another shape are another image.
    turned = Rows.of((patches[8:],), {"grid_thw": torch.tensor([[1, 2, 8]])})
    assert turned.digests(b"")[0].tolist() != alone.digests(b"")[0].tolist()
    (taken,), kwargs = both.take(np.array([1]))
    assert torch.equal(taken, patches[8:]) and torch.equal(kwargs["grid_thw"], grid[1:])
    merged = torch.arange(6)
    assert both.share_of(merged) == 4 and both.rows_of(merged, np.array([1, 0])).tolist() == [2, 3, 4, 5, 0, 1]


def test_rows_of_padded_images_may_give_entries_one_behind_the_other() -> None:
    """As Gemma 4's tower does, which leaves out padding: its places are -1."""
    places = torch.full((2, 16, 2), -1)
    places[0, :8], places[1, :16] = 0, 1
    both = Rows.of((torch.rand(2, 16, 3),), {"pixel_position_ids": places})
    assert both.number == 2 and not both.is_flat and both.lengths is not None and both.lengths.tolist() == [8, 16]
    pooled = torch.arange(6)
    assert both.share_of(pooled) == 4 and both.rows_of(pooled, np.array([1, 0])).tolist() == [2, 3, 4, 5, 0, 1]
    assert both.share_of(torch.rand(2, 5)) == both.share_of(torch.rand(5)) == both.share_of(torch.rand(48)) == 0
    # Places are an argument like others: each image has its own in the hash.
    alone = Rows.of((both.tensors[0][1:],), {"pixel_position_ids": places[1:]})
    assert alone.digests(b"").tolist() == both.digests(b"").tolist()[1:]
