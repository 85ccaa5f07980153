"""One pool for all layers: what is taken, evicted and dropped, and what an equal split changes."""

import pytest
import torch

from vllm_hybrid_sparse.errors import CapacityError, ConfigError
from vllm_hybrid_sparse.memory.device_pool import DevicePool, PoolShape
from vllm_hybrid_sparse.values import PageKey


def pool(capacity: int, *, layers: int = 2, unified: bool = True, eviction: str = "lru") -> DevicePool:
    shape = PoolShape(
        capacity_pages=capacity, layers=layers, head_dim=16, dtype=torch.float32, unified=unified, eviction=eviction
    )
    return DevicePool(shape)


def keys(*pages: int, layer: int = 0) -> list[PageKey]:
    return [PageKey(layer, 0, page) for page in pages]


def test_what_is_missing_is_named_once() -> None:
    made = pool(4)
    taken = made.take(keys(5, 6, 5))
    assert taken.missing == [0, 1]
    assert taken.slots[0] == taken.slots[2] != taken.slots[1]
    assert made.take(keys(6, 7)).missing == [1]
    made.release(keys(5, 6, 5))
    assert made.pinned_pages == 2
    made.check_integrity()


def test_pages_that_do_not_fit_leave_nothing_behind() -> None:
    made = pool(4)
    made.put(made.take(keys(0, 1)).slots, torch.zeros(2, 16, 16), torch.zeros(2, 16, 16))
    made.release(keys(1))
    with pytest.raises(CapacityError, match="device_pool_pages=4: 5 pages do not fit beside 1 in use"):
        made.take(keys(1, 2, 3, 4, 5))
    made.check_integrity()
    assert made.pinned_pages == 1
    assert made.slots_of(keys(0, 1, 2, 3, 4, 5)) == [0, 1, -1, -1, -1, -1]
    assert made.take(keys(1, 2, 3)).missing == [1, 2]
    assert made.take([]).slots == []


def test_a_layer_may_use_the_slots_that_another_does_not() -> None:
    for unified, resident in ((True, {0: 1, 1: 3}), (False, {0: 1, 1: 2})):
        made = pool(4, unified=unified)
        for key in keys(0) + keys(0, 1, 2, layer=1):
            made.take([key])
            made.release([key])
        assert dict(made.resident_by_layer()) == resident
        made.check_integrity()


def test_the_layers_of_a_split_pool_take_turns_under_cyclic() -> None:
    """Or pages that nobody uses any more, as those of a request that has ended, would never make room."""
    made = pool(8, unified=False, eviction="cyclic")
    steps = [(0, 1, 2, 3), *[(10, 11, 12)] * 3]
    missing = []
    for pages in steps:
        for layer in (0, 1):
            taken = made.take(keys(*pages, layer=layer))
            made.release(keys(*pages, layer=layer))
        missing.append(len(taken.missing))
    assert missing == [4, 3, 0, 0]
    for step in range(3):  # two at a time, as microbatches are
        for layer in (0, 1):
            for pages in ((20, 21), (22, 23)):
                taken = made.take(keys(*pages, layer=layer))
                made.release(keys(*pages, layer=layer))
                assert step < 2 or not taken.missing, (step, layer, pages)
    made.check_integrity()


def test_a_full_layer_of_a_split_pool_does_not_push_another_out() -> None:
    made = pool(4, unified=False)
    made.take(keys(0, 1))
    with pytest.raises(CapacityError, match="device_pool_pages=2"):
        made.take(keys(2))
    assert made.take(keys(0, 1, layer=1)).slots == [2, 3]
    made.check_integrity()


def test_slots_of_a_split_that_is_not_even_are_left_over() -> None:
    assert len(pool(7, layers=3, unified=False).key) == 6


def test_a_dropped_page_is_missing_again() -> None:
    made = pool(4)
    made.take(keys(0, 1))
    made.release(keys(0, 1))
    assert made.drop(keys(1, 2)) == 1
    assert made.take(keys(0, 1)).missing == [1]


def test_a_token_is_written_where_its_page_lies() -> None:
    made = pool(2)
    slots = made.take(keys(8, 9)).slots
    made.put(slots, torch.zeros(2, 16, 16), torch.zeros(2, 16, 16))
    made.put_tokens([slots[1]], [3], torch.ones(1, 16), torch.full((1, 16), 2.0))
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
