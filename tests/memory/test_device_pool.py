"""One pool for all layers: what is taken, evicted and dropped, and what an equal split changes."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.memory.pages import take_part
from vllm_hybrid_sparse.errors import CapacityError, ConfigError
from vllm_hybrid_sparse.memory.device_pool import DevicePool, PoolShape
from vllm_hybrid_sparse.memory.page_keys import page_numbers


def pool(capacity: int, *, layers: int = 2, unified: bool = True, eviction: str = "lru") -> DevicePool:
    shape = PoolShape(
        capacity_pages=capacity, layers=layers, head_dim=16, dtype=torch.float32, unified=unified, eviction=eviction
    )
    return DevicePool(shape)


def numbers(*pages: int, layer: int = 0) -> NDArray[np.int64]:
    return page_numbers(layer, 0, np.array(pages, dtype=np.int64))


def take(pool: DevicePool, pages: NDArray[np.int64]) -> tuple[NDArray[np.int32], list[int]]:
    """Slots of the pages of one part, and the places of those that are missing; CapacityError if it is refused."""
    slots, fresh = take_part(pool, pages)
    return slots, np.flatnonzero(fresh).tolist()


def test_what_is_missing_is_named_once() -> None:
    made = pool(4)
    slots, missing = take(made, numbers(5, 6, 5))
    assert missing == [0, 1]
    assert slots[0] == slots[2] != slots[1]
    assert take(made, numbers(6, 7))[1] == [1]
    made.release(numbers(5, 6, 5))
    assert made.pinned_pages == 2
    made.check_integrity()


def test_pages_that_do_not_fit_leave_nothing_behind() -> None:
    made = pool(4)
    made.put(take(made, numbers(0, 1))[0], torch.zeros(2, 16, 16), torch.zeros(2, 16, 16))
    made.release(numbers(1))
    with pytest.raises(CapacityError, match="device_pool_pages=4: 5 pages do not fit beside 1 in use"):
        take(made, numbers(1, 2, 3, 4, 5))
    made.check_integrity()
    assert made.pinned_pages == 1
    assert made.slots_of(numbers(0, 1, 2, 3, 4, 5)).tolist() == [0, 1, -1, -1, -1, -1]
    assert made.missing(np.array([0, 2, -1])).tolist() == [False, True, False]
    assert take(made, numbers(1, 2, 3))[1] == [1, 2]
    assert take(made, numbers())[0].tolist() == []


def test_a_layer_may_use_the_slots_that_another_does_not() -> None:
    for unified, resident in ((True, {0: 1, 1: 3}), (False, {0: 1, 1: 2})):
        made = pool(4, unified=unified)
        for page in (numbers(0), *(numbers(page, layer=1) for page in (0, 1, 2))):
            take(made, page)
            made.release(page)
        held = {layer: int((made.slots_of(numbers(0, 1, 2, layer=layer)) >= 0).sum()) for layer in (0, 1)}
        assert held == resident
        made.check_integrity()


def test_the_layers_of_a_split_pool_take_turns_under_cyclic() -> None:
    """Otherwise pages that nobody uses any more, such as those of an ended request, would never make room."""
    made = pool(8, unified=False, eviction="cyclic")
    steps = [(0, 1, 2, 3), *[(10, 11, 12)] * 3]
    lacking = []
    for pages in steps:
        for layer in (0, 1):
            _, missing = take(made, numbers(*pages, layer=layer))
            made.release(numbers(*pages, layer=layer))
        lacking.append(len(missing))
    assert lacking == [4, 3, 0, 0]
    for step in range(3):  # two pages at a time, like microbatches
        for layer in (0, 1):
            for pages in ((20, 21), (22, 23)):
                _, missing = take(made, numbers(*pages, layer=layer))
                made.release(numbers(*pages, layer=layer))
                assert step < 2 or not missing, (step, layer, pages)
    made.check_integrity()


def test_a_full_layer_of_a_split_pool_does_not_push_another_out() -> None:
    made = pool(4, unified=False)
    take(made, numbers(0, 1))
    with pytest.raises(CapacityError, match="device_pool_pages=2"):
        take(made, numbers(2))
    assert take(made, numbers(0, 1, layer=1))[0].tolist() == [2, 3]
    made.check_integrity()


def test_slots_of_a_split_that_is_not_even_are_left_over() -> None:
    assert len(pool(7, layers=3, unified=False).key) == 6


def test_a_dropped_page_is_missing_again() -> None:
    made = pool(4)
    take(made, numbers(0, 1))
    made.release(numbers(0, 1))
    assert made.drop(numbers(1, 2)) == 1
    assert take(made, numbers(0, 1))[1] == [1]


def test_a_token_is_written_where_its_page_lies() -> None:
    made = pool(2)
    slots, _ = take(made, numbers(8, 9))
    made.put(slots, torch.zeros(2, 16, 16), torch.zeros(2, 16, 16))
    made.put_tokens(slots[1:], np.array([3]), torch.ones(1, 16), torch.full((1, 16), 2.0))
    assert made.key[slots[1]].sum() == 16
    assert made.key[slots[1], 3].sum() == 16
    assert made.value[slots[1], 3].sum() == 32
    assert made.key[slots[0]].abs().sum() == 0


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"layers": 0}, "layers=0"),
        ({"capacity_pages": 0}, "device_pool_pages=0: must be at least 1"),
        ({"capacity_pages": 1, "unified": False}, "device_pool_pages=1: must be at least 2"),
        ({"eviction": "random"}, "device_eviction='random': must be one of cyclic, lru, fifo"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(changes: dict[str, object], refusal: str) -> None:
    given: dict[str, object] = {"capacity_pages": 4, "layers": 2, "head_dim": 16, "dtype": torch.float32}
    with pytest.raises(ConfigError, match=refusal):
        PoolShape(**(given | changes))  # type: ignore[arg-type]
