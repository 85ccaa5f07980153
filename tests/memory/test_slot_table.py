"""Which page lies in which slot: orders of eviction, pins, and what is refused; the native table and its reference."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.memory import slot_reference
from tests.memory.pages import all_of, named, numbered, side_by_side, take_part
from vllm_hybrid_sparse.errors import CapacityError
from vllm_hybrid_sparse.memory.page_keys import PageKey
from vllm_hybrid_sparse.memory.slot_table import NO_SLOT, SlotTable, Taken
from vllm_hybrid_sparse.settings import DEVICE_EVICTIONS


def page(number: int) -> PageKey:
    return PageKey(layer=0, kv_head=0, page=number)


def make_table(slots: int, eviction: str = "lru") -> SlotTable:
    return SlotTable(shares=1, every=slots, eviction=eviction)


def take(table: SlotTable, *keys: PageKey) -> tuple[list[int], list[bool]]:
    """Slots of pages, and which of them are fresh; CapacityError if they do not fit."""
    slots, fresh = take_part(table, numbered(keys))
    return slots.tolist(), fresh.tolist()


def unpin(table: SlotTable, *keys: PageKey) -> None:
    table.unpin(numbered(keys))


def use(table: SlotTable, *numbers: int) -> list[bool]:
    """Take and unpin pages one after another; return whether each was resident."""
    found = []
    for number in numbers:
        _, (fresh,) = take(table, page(number))
        found.append(not fresh)
        unpin(table, page(number))
        table.check_integrity()
    return found


def slots(table: SlotTable, *numbers: int) -> list[int]:
    return table.slots_of(numbered([page(number) for number in numbers])).tolist()


def resident(table: SlotTable) -> set[int]:
    return {key.page for key in named(table.pages())}


@pytest.mark.parametrize(("eviction", "kept"), [("lru", {0, 2, 3}), ("fifo", {1, 2, 3}), ("cyclic", {1, 2, 3})])
def test_the_order_decides_which_page_makes_room(eviction: str, kept: set[int]) -> None:
    table = make_table(3, eviction)
    assert use(table, 0, 1, 2, 0, 3) == [False, False, False, True, False]
    assert resident(table) == kept
    assert table.evictions == 1


@pytest.mark.parametrize("eviction", DEVICE_EVICTIONS)
def test_a_page_keeps_its_slot_while_it_is_resident(eviction: str) -> None:
    table = make_table(4, eviction)
    pages = [page(number) for number in range(4)]
    assert take(table, *pages) == ([0, 1, 2, 3], [True] * 4)
    assert take(table, *pages) == ([0, 1, 2, 3], [False] * 4)
    assert slots(table, *range(5)) == [0, 1, 2, 3, NO_SLOT]


@pytest.mark.parametrize("eviction", DEVICE_EVICTIONS)
def test_pinned_page_is_never_evicted(eviction: str) -> None:
    table = make_table(2, eviction)
    take(table, page(0))
    assert use(table, *range(1, 9)) == [False] * 8
    assert slots(table, 0) == [0]
    unpin(table, page(0))
    take(table, page(1), page(2))
    assert slots(table, 0) == [NO_SLOT]


def test_every_pin_has_to_be_undone() -> None:
    table = make_table(1)
    assert take(table, page(0), page(0)) == ([0, 0], [True, False])
    unpin(table, page(0))
    assert table.pinned == 1
    with pytest.raises(CapacityError, match="device_pool_pages=1: 1 pages do not fit beside 1 in use"):
        take(table, page(1))
    table.check_integrity()
    assert resident(table) == {0}
    unpin(table, page(0))
    assert not table.pinned
    assert use(table, 1) == [False]


def test_a_pin_that_is_not_there_cannot_be_undone() -> None:
    table = make_table(2)
    use(table, 0)
    for number in (0, 1):
        with pytest.raises(ValueError, match=f"page={number}: is not pinned"):
            unpin(table, page(number))


def test_a_page_of_no_layer_of_a_split_is_refused() -> None:
    table = SlotTable(shares=2, every=1, eviction="lru")
    with pytest.raises(ValueError, match="is of no layer of the pool"):
        take(table, PageKey(2, 0, 0))


def runs(*firsts: int) -> NDArray[np.int32]:
    return np.array(firsts, dtype=np.int32)


@pytest.mark.parametrize("eviction", DEVICE_EVICTIONS)
def test_slots_that_are_set_aside_hold_no_page_until_they_are_given_back(eviction: str) -> None:
    table = make_table(6, eviction)
    use(table, *range(6))
    assert table.set_aside(runs(4, 2), 2).all()
    assert resident(table) == {0, 1}
    assert table.evictions == 4
    use(table, *range(6))
    assert (slots(table, 5)[0] < 2, len(table)) == (True, 2)
    with pytest.raises(CapacityError, match="3 pages do not fit"):
        take(table, page(0), page(1), page(2))
    table.give_back(runs(4), 2)
    table.check_integrity()
    assert take(table, *map(page, range(4)))[1].count(True) >= 2
    table.check_integrity()


def test_a_run_with_a_pinned_slot_is_not_set_aside() -> None:
    table = make_table(6)
    take(table, page(0))
    use(table, 1, 2)
    assert table.set_aside(runs(0, 3, 4), 2).tolist() == [False, True, False]
    assert resident(table) == {0, 1, 2}
    with pytest.raises(ValueError, match="slot=2: is in use"):
        table.give_back(runs(3, 1), 2)
    assert not table.set_aside(runs(3), 2).any()  # still are: none is given back unless all can be
    with pytest.raises(IndexError, match="slots 5 to 7: there are 6"):
        table.set_aside(runs(5), 2)


def test_a_dropped_page_frees_its_slot_and_its_pins() -> None:
    table = make_table(1)
    take(table, page(0))
    assert table.drop(numbered([page(0), page(0), page(7)])) == 1
    assert (len(table), table.pinned, table.evictions) == (0, 0, 0)
    assert use(table, 1) == [False]


@pytest.mark.parametrize("eviction", DEVICE_EVICTIONS)
def test_pages_that_do_not_fit_together_change_nothing(eviction: str) -> None:
    table = make_table(3, eviction)
    use(table, 0, 1)
    take(table, page(0))
    with pytest.raises(CapacityError, match="3 pages do not fit beside 1 in use"):
        take(table, page(1), page(2), page(3), page(2))
    table.check_integrity()
    assert (resident(table), table.pinned, table.evictions) == ({0, 1}, 1, 0)


@pytest.mark.parametrize("eviction", DEVICE_EVICTIONS)
def test_a_page_that_is_wanted_makes_no_room_for_one_beside_it(eviction: str) -> None:
    table = make_table(3, eviction)
    use(table, 0, 1, 2)
    assert take(table, page(0), page(1), page(3))[1] == [False, False, True]
    assert resident(table) == {0, 1, 3}


def steps(eviction: str, slots: int, pages: int, count: int) -> float:
    """Run steps in which two layers want the same pages; return the share found in the last step."""
    table = make_table(slots, eviction)
    found = []
    for _ in range(count):
        found.clear()
        for layer in range(2):
            for number in range(pages):
                _, (fresh,) = take(table, PageKey(layer, 0, number))
                found.append(not fresh)
                unpin(table, PageKey(layer, 0, number))
        table.check_integrity()
    return sum(found) / len(found)


@pytest.mark.parametrize(("eviction", "found"), [("cyclic", 16 / 20), ("lru", 0.0), ("fifo", 0.0)])
def test_layers_that_take_turns_find_what_fits_under_cyclic_alone(eviction: str, found: float) -> None:
    assert steps(eviction, slots=16, pages=10, count=5) == pytest.approx(found)
    assert steps(eviction, slots=20, pages=10, count=3) == 1.0


def test_what_a_layer_leaves_out_goes_first_under_cyclic() -> None:
    table = make_table(4, "cyclic")

    def turn(layer: int, *numbers: int) -> None:
        for number in numbers:
            take(table, PageKey(layer, 0, number))
            unpin(table, PageKey(layer, 0, number))

    turn(0, 0, 1)
    turn(1, 0, 1)
    turn(0, 0)
    turn(1, 0, 2)
    assert set(named(table.pages())) == {(0, 0, 0), (1, 0, 0), (1, 0, 1), (1, 0, 2)}
    turn(0, 0, 2)
    assert set(named(table.pages())) == {(0, 0, 0), (1, 0, 0), (0, 0, 2), (1, 0, 2)}


def test_looking_a_page_up_is_no_use_of_it() -> None:
    table = make_table(2)
    use(table, 0, 1)
    slots(table, 0)
    use(table, 2)
    assert resident(table) == {1, 2}


class Twin:
    """The reference, with one table for each share; it is given the same."""

    def __init__(self, shares: int, every: int, eviction: str) -> None:
        turns = slot_reference.Turns()
        self.tables = [
            slot_reference.SlotTable(
                range(share * every, (share + 1) * every), slot_reference.EVICTIONS[eviction](turns)
            )
            for share in range(shares)
        ]

    def table(self, layer: int) -> slot_reference.SlotTable:
        return self.tables[layer if len(self.tables) > 1 else 0]

    def take(self, parts: Sequence[Sequence[PageKey]], wanted: Sequence[bool]) -> Taken:
        width = max(map(len, parts))
        slots, fresh = np.full((len(parts), width), NO_SLOT, np.int32), np.zeros((len(parts), width), np.bool_)
        refused = {}
        for part, keys in enumerate(parts):
            if not wanted[part] or not keys:
                continue
            try:
                taken = self.table(keys[0].layer).take(keys)
            except CapacityError as error:
                refused[part] = error
                continue
            slots[part, : len(keys)] = taken.slots
            fresh[part, taken.missing] = True
        return Taken(slots, fresh, refused)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_native_table_is_the_reference_slot_for_slot(data: Any) -> None:
    eviction = data.draw(st.sampled_from(DEVICE_EVICTIONS))
    layers = data.draw(st.integers(1, 3))
    shares, every = data.draw(st.sampled_from([1, layers])), data.draw(st.integers(1, 9))
    table, twin = SlotTable(shares=shares, every=every, eviction=eviction), Twin(shares, every, eviction)
    held: list[PageKey] = []
    aside: list[tuple[int, range]] = []  # share and slots
    for _ in range(data.draw(st.integers(1, 30))):
        layer = data.draw(st.integers(0, layers - 1))
        of_layer = st.builds(PageKey, st.just(layer), st.integers(0, 1), st.integers(0, 6))
        parts = data.draw(st.lists(st.lists(of_layer, max_size=5), min_size=1, max_size=4))
        wanted = data.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts)))
        pages = side_by_side(parts)
        if pages.shape[1]:
            mine, theirs = table.take(pages, np.array(wanted)), twin.take(parts, wanted)
            np.testing.assert_array_equal(mine.slots, theirs.slots)
            np.testing.assert_array_equal(mine.fresh, theirs.fresh)
            assert {part: str(error) for part, error in mine.refused.items()} == {
                part: str(error) for part, error in theirs.refused.items()
            }
            held += named(pages[mine.slots >= 0])
        released = data.draw(st.lists(st.sampled_from(range(len(held))), unique=True)) if held else []
        unpin(table, *[held[index] for index in released])
        for index in released:
            twin.table(held[index].layer).unpin(held[index])
        held = [key for index, key in enumerate(held) if index not in set(released)]
        dropped = data.draw(st.lists(of_layer, max_size=2))
        assert table.drop(numbered(dropped)) == sum(twin.table(layer).drop(key) for key in dropped)
        held = [key for key in held if key not in dropped]
        share, length = data.draw(st.integers(0, shares - 1)), data.draw(st.integers(1, min(3, every)))
        firsts = [share * every + data.draw(st.integers(0, every - length)) for _ in range(2)]
        taken = table.set_aside(np.array(firsts, np.int32), length).tolist()
        runs = [range(first, first + length) for first in firsts]
        assert taken == [twin.tables[share].set_aside(run) for run in runs]
        aside += [(share, run) for run, was_taken in zip(runs, taken, strict=True) if was_taken]
        for back, run in [aside.pop(0) for _ in range(data.draw(st.integers(0, len(aside))))]:
            table.give_back(np.array([run.start], np.int32), len(run))
            twin.tables[back].give_back(run)
        table.check_integrity()
        assert (len(table), table.pinned) == (sum(map(len, twin.tables)), sum(of.pinned for of in twin.tables))
        assert table.evictions == sum(of.evictions for of in twin.tables)


def test_thousands_of_pages_come_and_go_without_being_lost() -> None:
    """More pages than in the property test: the map is emptied and filled over and over."""
    rng, table = np.random.default_rng(0), SlotTable(shares=1, every=3000, eviction="cyclic")
    for _ in range(200):
        layer = int(rng.integers(4))
        keys = [PageKey(layer, int(head), int(number)) for head, number in rng.integers((8, 4000), size=(256, 2))]
        pages = numbered(keys).reshape(32, 8)
        taken = table.take(pages, all_of(pages))
        assert not taken.refused
        assert (table.slots_of(pages) == taken.slots).all()
        table.unpin(pages)
        table.drop(pages[::3])
        assert (table.slots_of(pages[::3]) == NO_SLOT).all()
        table.check_integrity()
    assert table.evictions > 0
    assert len(set(table.pages().tolist())) == len(table)
