"""Which page lies in which slot: orders of eviction, pins, and what is refused."""

import pytest

from vllm_hybrid_sparse.errors import CapacityError
from vllm_hybrid_sparse.policy.eviction import EVICTIONS
from vllm_hybrid_sparse.policy.slot_table import SlotTable
from vllm_hybrid_sparse.values import PageKey


def page(number: int) -> PageKey:
    return PageKey(layer=0, kv_head=0, page=number)


def use(table: SlotTable, *numbers: int) -> list[bool]:
    """Take and unpin pages one after another; whether each was resident."""
    found = []
    for number in numbers:
        found.append(not table.take([page(number)]).missing)
        table.unpin(page(number))
        table.check_integrity()
    return found


def resident(table: SlotTable) -> set[int]:
    return {key.page for key in table}


@pytest.mark.parametrize(("eviction", "kept"), [("lru", {0, 2, 3}), ("fifo", {1, 2, 3}), ("cyclic", {1, 2, 3})])
def test_the_order_decides_which_page_makes_room(eviction: str, kept: set[int]) -> None:
    table = SlotTable(range(3), EVICTIONS[eviction]())
    assert use(table, 0, 1, 2, 0, 3) == [False, False, False, True, False]
    assert resident(table) == kept
    assert table.evictions == 1


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_page_keeps_its_slot_while_it_is_resident(eviction: str) -> None:
    table = SlotTable(range(10, 14), EVICTIONS[eviction]())
    pages = [page(number) for number in range(4)]
    assert table.take(pages) == ([10, 11, 12, 13], [0, 1, 2, 3])
    assert table.take(pages) == ([10, 11, 12, 13], [])
    assert [table.slot_of(page(number)) for number in range(5)] == [10, 11, 12, 13, None]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_pinned_page_is_never_evicted(eviction: str) -> None:
    table = SlotTable(range(2), EVICTIONS[eviction]())
    table.take([page(0)])
    assert use(table, *range(1, 9)) == [False] * 8
    assert table.slot_of(page(0)) == 0
    table.unpin(page(0))
    table.take([page(1), page(2)])
    assert table.slot_of(page(0)) is None


def test_every_pin_has_to_be_undone() -> None:
    table = SlotTable(range(1), EVICTIONS["lru"]())
    table.take([page(0), page(0)])
    table.unpin(page(0))
    assert table.is_pinned(page(0))
    with pytest.raises(CapacityError, match="device_pool_pages=1: 1 pages do not fit beside 1 in use"):
        table.take([page(1)])
    table.check_integrity()
    assert resident(table) == {0}
    table.unpin(page(0))
    assert not table.pinned
    assert use(table, 1) == [False]


def test_a_dropped_page_frees_its_slot_and_its_pins() -> None:
    table = SlotTable(range(1), EVICTIONS["lru"]())
    table.take([page(0)])
    assert table.drop(page(0))
    assert not table.drop(page(0))
    assert (len(table), table.pinned, table.evictions) == (0, 0, 0)
    assert use(table, 1) == [False]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_pages_that_do_not_fit_together_change_nothing(eviction: str) -> None:
    table = SlotTable(range(3), EVICTIONS[eviction]())
    use(table, 0, 1)
    table.take([page(0)])
    with pytest.raises(CapacityError, match="3 pages do not fit beside 1 in use"):
        table.take([page(1), page(2), page(3)])
    table.check_integrity()
    assert (resident(table), table.pinned, table.evictions) == ({0, 1}, 1, 0)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_page_that_is_wanted_makes_no_room_for_one_beside_it(eviction: str) -> None:
    table = SlotTable(range(3), EVICTIONS[eviction]())
    use(table, 0, 1, 2)
    assert table.take([page(0), page(1), page(3)]).missing == [2]
    assert resident(table) == {0, 1, 3}


def steps(eviction: str, slots: int, pages: int, count: int) -> float:
    """Two layers that want the same pages in every step; the share found in the last one."""
    table = SlotTable(range(slots), EVICTIONS[eviction]())
    found = []
    for _ in range(count):
        found.clear()
        for layer in range(2):
            for number in range(pages):
                key = PageKey(layer, 0, number)
                found.append(not table.take([key]).missing)
                table.unpin(key)
        table.check_integrity()
    return sum(found) / len(found)


@pytest.mark.parametrize(("eviction", "found"), [("cyclic", 16 / 20), ("lru", 0.0), ("fifo", 0.0)])
def test_layers_that_take_turns_find_what_fits_under_cyclic_alone(eviction: str, found: float) -> None:
    assert steps(eviction, slots=16, pages=10, count=5) == pytest.approx(found)
    assert steps(eviction, slots=20, pages=10, count=3) == 1.0


def test_what_a_layer_leaves_out_goes_first_under_cyclic() -> None:
    table = SlotTable(range(4), EVICTIONS["cyclic"]())

    def turn(layer: int, *numbers: int) -> None:
        for number in numbers:
            table.take([PageKey(layer, 0, number)])
            table.unpin(PageKey(layer, 0, number))

    turn(0, 0, 1)
    turn(1, 0, 1)
    turn(0, 0)
    turn(1, 0, 2)
    assert set(table) == {(0, 0, 0), (1, 0, 0), (1, 0, 1), (1, 0, 2)}
    turn(0, 0, 2)
    assert set(table) == {(0, 0, 0), (1, 0, 0), (0, 0, 2), (1, 0, 2)}


def test_looking_a_page_up_is_no_use_of_it() -> None:
    table = SlotTable(range(2), EVICTIONS["lru"]())
    use(table, 0, 1)
    table.slot_of(page(0))
    use(table, 2)
    assert resident(table) == {1, 2}


def test_a_lost_slot_is_found() -> None:
    table = SlotTable(range(2), EVICTIONS["lru"]())
    use(table, 0)
    table._free.clear()
    with pytest.raises(AssertionError, match="lost or held twice"):
        table.check_integrity()
