"""The layout: which blocks a stage holds, which stages a rank."""

from __future__ import annotations

import json

import pytest

from hf_pipetransformer.schedules import placement as blocks
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import PLACEMENTS, Placement


def layout(num_stages: int = 2, num_layers: int = 6, **fields) -> Layout:
    num_blocks = blocks.num_blocks(num_layers)
    boundaries = tuple(num_blocks * stage // num_stages for stage in range(num_stages + 1))
    given = {"num_frozen_layers": 0, "num_replicas": 2, "num_microbatches": 4, "schedule": "1f1b", **fields}
    return Layout(num_layers=num_layers, num_stages=num_stages, boundaries=boundaries, **given)


def test_blocks_are_numbered_from_the_embeddings_to_the_head():
    layers = range(3)
    chain = [blocks.EMBEDDINGS, *(u for layer in layers for u in (blocks.attention_of(layer), blocks.mlp_of(layer)))]
    assert [*chain, blocks.head_of(3)] == list(range(blocks.num_blocks(3)))
    assert [blocks.block_of(block) for block in range(blocks.num_blocks(3))] == [0, 1, 1, 2, 2, 3, 3, 4]
    assert [blocks.first_above(num_layers) for num_layers in range(4)] == [0, 3, 5, blocks.head_of(3)]


def test_loop_placement_begins_every_chunk_at_the_first_rank():
    found = layout(6, num_chunks=2)
    assert (found.pipeline_size, found.num_stages) == (3, 6)
    assert [found.places.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]


def test_v_placement_comes_back_to_the_first_rank():
    found = layout(6, num_chunks=2, placement="v")
    assert [found.places.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_trackers_see_the_ranks_of_a_pipeline_and_their_stages():
    assert layout(4).as_scalars()["pipeline_stages"] == 4
    assert "pipeline_chunks" not in layout(4).as_scalars()
    in_chunks = layout(4, num_chunks=2).as_scalars()
    assert (in_chunks["pipeline_stages"], in_chunks["pipeline_chunks"]) == (2, 2)


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("pipeline_size", [2, 3, 4])
def test_every_stage_and_block_lies_on_one_rank(pipeline_size, num_chunks, kind):
    found = layout(pipeline_size * num_chunks, num_layers=8, num_chunks=num_chunks, placement=kind)
    for stage in range(found.num_stages):
        rank, chunk = found.places.rank_of(stage), found.places.chunk_of(stage)
        assert found.places.stages_of(rank)[chunk] == stage
        assert found.blocks_of_rank(rank)[chunk] == found.blocks_of(stage)
    held = [block for rank in range(pipeline_size) for part in found.blocks_of_rank(rank) for block in part]
    assert sorted(held) == list(range(found.num_blocks))


def test_ranks_that_use_some_blocks_are_named_once_first_user_first():
    found = layout(4, num_chunks=2, placement="v")
    first, second = found.blocks_of(0)[0], found.blocks_of(2)[0]
    assert found.ranks_of([first, second, found.num_blocks - 1]) == (0, 1)
    assert found.ranks_of([second, found.num_blocks - 1]) == (1, 0)


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_a_layout_comes_back_from_its_event(kind):
    found = layout(4, num_chunks=2, placement=kind)
    assert Layout.from_event(json.loads(json.dumps(found.as_event()))) == found


def test_an_event_without_chunks_is_a_layout_of_one_stage_a_rank():
    event = layout().as_event()
    del event["num_chunks"], event["placement"]
    assert Layout.from_event(event) == layout()


def test_what_an_event_of_an_earlier_release_says_of_random_samples_is_not_read():
    for name in ("fresh_share", "refresh_fraction"):
        assert Layout.from_event({**layout().as_event(), name: 0.25}) == layout()


def test_the_words_for_one_stage_a_rank_do_not_speak_of_chunks():
    assert str(layout()).startswith("2 stages x 2 replicas, 4 micro-batches")
    assert str(layout(4, num_chunks=2)).startswith("2 ranks of 2 stages x 2 replicas, 4 micro-batches")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_stages": 3, "num_chunks": 2}, "3 stages do not make a pipeline of ranks with 2"),
        ({"num_stages": 2, "num_chunks": 2}, "expected two ranks or more"),
        ({"num_chunks": 0}, "with 0 stages each"),
        ({"placement": "w"}, "Unknown placement 'w'"),
    ],
)
def test_ranks_hold_equally_many_stages(fields, text):
    with pytest.raises(ValueError, match=text):
        layout(**fields)


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("pipeline_size", range(1, 9))
def test_boundaries_between_ranks_fall_into_rounds_of_which_no_rank_is_in_two(pipeline_size, num_chunks, kind):
    places = Placement(pipeline_size, num_chunks, kind)
    rounds = places.rounds()
    assert sorted(lower for each in rounds for lower in each) == [
        lower for lower in range(places.num_stages - 1) if places.rank_of(lower) != places.rank_of(lower + 1)
    ]
    for each in rounds:
        ends = [places.rank_of(stage) for lower in each for stage in (lower, lower + 1)]
        assert len(ends) == len(set(ends))
    assert num_chunks > 1 or len(rounds) <= 2
    assert len(rounds) < 4 * num_chunks
