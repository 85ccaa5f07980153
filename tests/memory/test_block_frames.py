"""Which blocks have frames, and where their pages lie."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hybrid_sparse.memory.block_frames import NO_FRAME, BlockFrames, FrameShape


def blocks(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int64)


def with_frames(frames: int, of_blocks: int = 10) -> BlockFrames:
    table = BlockFrames(of_blocks, frames)
    table.add(range(frames))
    return table


def held(table: BlockFrames, of_blocks: int = 10) -> set[int]:
    return set(np.flatnonzero(table.frames_of(np.arange(of_blocks)) != NO_FRAME).tolist())


def test_pages_of_a_layer_lie_where_the_view_shows_them() -> None:
    shape = FrameShape(layers=3, kv_heads=2, pages_per_block=4)
    pool = torch.arange(60 * 16 * 8).view(60, 16, 8)
    frames = np.array([1, 0], dtype=np.int32)
    for layer in range(3):
        view, slots = shape.view(pool, layer), shape.slots_of(frames, layer)
        assert view.shape == (2, 2, 64, 8)
        assert slots.shape == (2, 2, 4)
        assert torch.equal(view[torch.from_numpy(frames).long()], pool[torch.from_numpy(slots).long()].flatten(2, 3))
        assert view.data_ptr() == pool[layer * 8].data_ptr()


def test_blocks_get_all_frames_they_need_or_none() -> None:
    table = with_frames(3)
    assert table.give(blocks(4, 5), step=1)
    assert not table.give(blocks(6, 7), step=1)
    assert held(table) == {4, 5}
    assert table.available(1) == 1
    table.check_integrity()


def test_blocks_used_longest_ago_make_room_and_those_of_the_step_do_not() -> None:
    table = with_frames(3)
    for step, block in enumerate((4, 5, 6)):
        assert table.give(blocks(block), step)
    table.use(blocks(4), step=3)
    assert table.available(3) == 2
    assert table.give(blocks(7), step=3)
    assert held(table) == {4, 6, 7}
    assert table.give(blocks(8), step=3)
    assert held(table) == {4, 7, 8}
    assert not table.give(blocks(9), step=3)
    table.check_integrity()


def test_a_dropped_block_leaves_a_free_frame() -> None:
    table = with_frames(2)
    table.give(blocks(4, 5), step=1)
    assert table.drop(blocks(5, 6, 5)) == 1
    assert (held(table), table.free) == ({4}, 1)
    table.check_integrity()


def test_frames_that_are_given_up_are_free_or_were_not_used_lately() -> None:
    table = with_frames(4)
    table.give(blocks(4), step=1)
    table.give(blocks(5), step=2)
    old = table.frames_of(blocks(4)).tolist()
    given_up = table.give_up(before_step=2)
    assert set(old) < set(given_up)
    assert (len(given_up), held(table), table.free) == (3, {5}, 0)
    table.add(given_up)
    table.check_integrity()


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_no_frame_is_lost_or_held_twice(data: Any) -> None:
    table, outside = BlockFrames(10, 5), set(range(5))
    some = st.lists(st.integers(0, 7), max_size=5, unique=True)
    for step in range(data.draw(st.integers(1, 25))):
        chosen = blocks(*data.draw(some))
        match data.draw(st.sampled_from(["give", "drop", "use", "add", "give_up"])):
            case "give":
                lacking = chosen[table.frames_of(chosen) == NO_FRAME]
                enough, before = table.available(step) >= len(lacking), held(table)
                assert table.give(lacking, step) == enough
                assert enough or held(table) == before
                assert not enough or (table.frames_of(lacking) != NO_FRAME).all()
            case "drop":
                table.drop(chosen)
            case "use":
                table.use(chosen[table.frames_of(chosen) != NO_FRAME], step)
            case "add" if outside:
                table.add([outside.pop()])
            case "give_up":
                outside |= set(table.give_up(step - 1))
        table.check_integrity()
        assert len(held(table)) + table.free + len(outside) == 5
