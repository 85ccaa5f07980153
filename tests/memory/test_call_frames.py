"""Frames of Python functions: with room for them, no depth of the stack makes calls map memory."""

import resource
from collections.abc import Callable

import pytest

from vllm_hybrid_sparse.memory.call_frames import with_frame_room

CALLS = 500


def leaf() -> None:
    pass


def mapped_by_calls() -> int:
    """How often CALLS calls from here met a page for the first time: once a call, if every call maps a chunk."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        leaf()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def at_depth(depth: int, function: Callable[[], int]) -> int:
    return function() if depth == 0 else at_depth(depth - 1, function)


def worst(depths: int) -> int:
    return max(at_depth(depth, mapped_by_calls) for depth in range(depths))


def test_some_depth_maps_memory_at_every_call_without_room() -> None:
    if worst(200) < CALLS:
        pytest.skip("this Python keeps its chunks")


@pytest.mark.parametrize("start", [0, 40, 100, 160])
def test_no_depth_maps_memory_with_room(start: int) -> None:
    def below() -> int:
        return with_frame_room(worst)(400)

    assert at_depth(start, below) < CALLS / 5


def test_arguments_result_error_and_name_are_the_functions() -> None:
    @with_frame_room
    def divided(a: float, *, by: float) -> float:
        """Divides."""
        return a / by

    assert divided(6.0, by=3.0) == 2.0
    assert (divided.__name__, divided.__doc__) == ("divided", "Divides.")
    with pytest.raises(ZeroDivisionError):
        divided(1.0, by=0.0)
    with pytest.raises(TypeError, match="by"):
        divided(1.0)  # type: ignore[call-arg]
