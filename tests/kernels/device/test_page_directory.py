"""The page directory against its plain reference: what is found, given, published, evicted, forgotten and set aside."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.device.directories import (
    CPU,
    Rows,
    check_look_up,
    check_same,
    check_turn,
    copied,
    directory_of,
    ints,
    listing,
)
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.page_directory import gpu
from vllm_hybrid_sparse.kernels.page_directory.reference import check_integrity
from vllm_hybrid_sparse.kernels.page_directory.state import (
    ARRIVING,
    FREE,
    IN_RESERVE,
    NOTHING,
    NOWHERE,
    SET_ASIDE,
    PageDirectory,
)

POISON = -77  # what new memory is filled with


@triton.jit
def _claim_kernel(words, places, wanted, before, tile: tl.constexpr):
    lanes = tl.arange(0, tile)
    is_wanted = tl.load(wanted + lanes) != 0
    mark = tl.full((tile,), -2, tl.int32)
    old = tl.atomic_min(words + tl.load(places + lanes), mark, mask=is_wanted, sem="relaxed")
    tl.store(before + lanes, old, mask=is_wanted)


def test_every_lane_of_an_atomic_gets_its_own_old_value(device: torch.device) -> None:
    """What the claims of look_up stand on."""
    words = torch.full((40,), NOWHERE, dtype=torch.int32, device=device)
    places, wanted = torch.randint(0, 40, (128,)), torch.rand(128) < 0.7
    before = torch.full((128,), POISON, dtype=torch.int32, device=device)
    _claim_kernel[(1,)](words, places.int().to(device), wanted.int().to(device), before, tile=128)
    old = before.cpu()
    for place in range(40):
        claims = old[(places == place) & wanted].tolist()
        assert claims.count(NOWHERE) == min(1, len(claims))
        assert set(claims) <= {NOWHERE, ARRIVING}
        assert words[place] == (ARRIVING if claims else NOWHERE)
    assert (old[~wanted] == POISON).all()


class Life:
    """Random operations in the order in which a step has them, on a directory of three layers and two KV heads."""

    def __init__(self, seed: int, device: torch.device, *, capacity: int, room: int, window: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.device, self.window = device, window
        self.store_pages, self.pages_per_block, self.kv_heads, self.layers = 24, 3, 2, 3
        self.directory = PageDirectory.empty(self.layers * self.kv_heads * self.store_pages, capacity, room, CPU)
        self.aside: list[int] = []
        self.hand = 0
        self.found = self.given = self.refused = 0  # pages looked up

    def below(self, end: int, *shape: int) -> Tensor:
        return torch.randint(0, end, shape, generator=self.random)

    def some(self, values: Sequence[int], most: int) -> list[int]:
        """A few of them, each once."""
        taken = torch.randperm(len(values), generator=self.random)[: int(self.below(most + 1))]
        return [values[i] for i in taken.tolist()]

    def rows(self, layer: int) -> Rows:
        """Rows over any blocks, some of them in several rows; retained set or candidates."""
        rows = int(self.below(4))
        pages = 1 + self.below(12, rows)
        seq_lens = (pages - 1) * 16 + 1 + self.below(16, rows)
        first_page = int(self.below(3))
        candidates = torch.minimum(self.below(6, rows), (pages - first_page).clamp(min=0))
        ordered = bool(self.below(2))
        lists = candidates if ordered else pages - candidates
        counts = (self.below(100, rows, self.kv_heads) * (lists + 1)[:, None] // 100).int()
        order = torch.rand(rows, self.kv_heads, 12, generator=self.random)
        order[torch.arange(12).expand_as(order) >= candidates[:, None, None]] = 2.0  # behind all candidates
        return Rows(
            blocks=torch.rand(rows, self.store_pages // self.pages_per_block, generator=self.random)
            .argsort(1)
            .int()[:, :4],
            seq_lens=seq_lens.int(),
            counts=counts,
            order=order.argsort(-1) if ordered else None,
            candidates=candidates.int(),
            first_page=first_page,
            most=12,
            pages_per_block=self.pages_per_block,
            store_pages=self.store_pages,
            first_entry=layer * self.kv_heads * self.store_pages,
        )

    def same(self, name: str, *args: Any, **numbers: int) -> None:
        self.directory = check_same(name, self.directory, self.device, *args, **numbers)

    def step(self, number: int) -> None:
        self.same("turn_over", step=number, hand=self.hand, window=self.window)
        assert not (self.directory.slots == ARRIVING).any()
        self.hand = (self.hand + self.window) % self.directory.capacity
        forgotten = torch.tensor(self.some(range(self.store_pages), 4) * 2, dtype=torch.int64)
        self.same("forget", forgotten, store_pages=self.store_pages, heads=self.layers * self.kv_heads)
        runs = self.some([first for first in range(0, self.directory.capacity - 1, 2) if first not in self.aside], 1)
        self.same("set_aside", ints(*runs), 2)
        back = self.some(self.aside, 2)
        self.same("give_back", ints(*back), 2)
        self.aside = [first for first in self.aside + runs if first not in back]
        for layer in range(self.layers):
            slots, self.directory = check_look_up(self.directory, self.rows(layer), number, self.device)
            self.found += sum(slot >= 0 for slot in slots)
            self.given += sum(slot < -1 for slot in slots)
            self.refused += sum(slot == -1 for slot in slots)


@pytest.mark.parametrize(
    ("capacity", "room", "window"), [(40, 8, 40), (40, 8, 9), (64, 40, 25), (5, 8, 5), (200, 130, 200), (4, 2, 3)]
)
def test_lives_of_the_kernels_and_the_reference_are_the_same(
    capacity: int, room: int, window: int, device: torch.device
) -> None:
    life = Life(capacity + window, device, capacity=capacity, room=room, window=window)
    for number in range(1, 33):
        life.step(number)
    assert min(life.found, life.given, life.refused) > 0


def test_a_page_in_a_slot_is_found_and_stamped(device: torch.device) -> None:
    directory = directory_of(32, 4, 1, held={2: 5, 0: 21})
    # The first row's page 7 lies nowhere, and is not full: it asks for no slot.
    rows = listing([[[5, 7]], [[5]]], seq_lens=ints(7 * 16 + 3, 256))
    slots, after = check_look_up(directory, rows, 9, device)
    assert slots == [2, -1, 0]
    assert after.used.tolist() == [9, FREE, 9, FREE]
    assert int(after.cursor) == 0


def test_heads_and_layers_have_entries_of_their_own(device: torch.device) -> None:
    rows = listing([[[1], [1]]], first_entry=32)  # the second layer of 2 KV heads and 16 pages
    slots, _ = check_look_up(directory_of(64, 4, 1, held={0: 1, 1: 17, 2: 33, 3: 49}), rows, 2, device)
    assert slots == [2, 3]


def test_a_page_that_lies_nowhere_gets_a_slot_of_the_reserve(device: torch.device) -> None:
    directory = directory_of(16, 6, 3, reserve=[4, 1, 5])
    slots, after = check_look_up(directory, listing([[[7, 2]]]), 3, device)
    assert slots == [-2 - 4, -2 - 1]
    assert after.slots[[7, 2]].tolist() == [ARRIVING, ARRIVING]
    assert (after.arrivals[:2].tolist(), int(after.cursor)) == ([7, 2], 2)
    turned = check_turn(after, device, step=4, hand=0, window=6)
    assert turned.slots[[7, 2]].tolist() == [4, 1]
    assert turned.used[[4, 1]].tolist() == [3, 3]
    assert turned.reserve.tolist() == [0, 2, 5]


def test_of_rows_that_read_a_page_one_gets_a_slot_for_it(device: torch.device) -> None:
    rows = listing([[[0, 1, 2]]] * 3, blocks=torch.arange(16, dtype=torch.int32).expand(3, 16).contiguous())
    slots, after = check_look_up(directory_of(48, 8, 4, reserve=[0, 1, 2, 3]), rows, 1, device)
    assert sorted(slots) == [-4, -3, -2] + [-1] * 6
    assert int(after.cursor) == 3
    assert check_look_up(after, rows, 1, device)[0] == [-1] * 9


def test_of_readers_that_look_at_a_time_one_gets_a_slot(device: torch.device) -> None:
    """Lanes that all see NOWHERE: interpreted programs do not run side by side, so a group names a page twice."""
    slots, after = check_look_up(directory_of(16, 4, 4, reserve=[0, 1, 2, 3]), listing([[[3, 5, 3, 3]]]), 1, device)
    assert slots == [-2, -3, -1, -1]
    assert int(after.cursor) == 2


def test_no_page_is_lost_where_the_reserve_has_too_little_room(device: torch.device) -> None:
    directory = directory_of(32, 4, 2, reserve=[3, 0])
    slots, after = check_look_up(directory, listing([[[0, 1, 2, 3]], [[9]]]), 1, device)
    assert sorted(slots) == [-5, -2, -1, -1, -1]
    assert (after.slots == ARRIVING).sum() == 2
    assert int(after.cursor) == 5
    turned = check_turn(after, device, step=2, hand=0, window=4)
    assert (turned.slots >= 0).sum() == 2
    assert int(turned.cursor) == 0


def test_places_without_a_slot_are_drawn_and_give_none(device: torch.device) -> None:
    directory = directory_of(16, 4, 4, reserve=[-1, 2, -1, 1])
    slots, after = check_look_up(directory, listing([[[0, 1, 2]]]), 1, device)
    assert slots == [-1, -4, -1]
    assert (after.slots == ARRIVING).sum() == 3
    turned = check_turn(after, device, step=2, hand=0, window=4)
    assert turned.slots[:3].tolist() == [NOWHERE, 2, NOWHERE]
    assert turned.reserve.tolist() == [0, 3, -1, 1]


@pytest.mark.parametrize(("tokens", "last"), [(33, 1), (47, 15), (48, 16)])
def test_a_page_that_is_not_full_gets_no_slot(tokens: int, last: int, device: torch.device) -> None:
    directory = directory_of(16, 4, 3, reserve=[0, 1, 2])
    rows = listing([[[2, 0, 1]]], seq_lens=ints(tokens))
    slots, after = check_look_up(directory, rows, 1, device)
    assert slots == ([-2, -3, -4] if last == 16 else [-1, -2, -3])
    listed = rows.look_up(copied(directory, device), 1, gpu.look_up, device)
    assert rows.within(listed.tokens) == [last, 16, 16]
    assert (int(after.slots[2]) == ARRIVING) == (last == 16)


def test_the_retained_set_is_the_pages_around_the_candidates(device: torch.device) -> None:
    rows = listing([[[0] * 5]], order=None, first_page=2, candidates=ints(6), seq_lens=ints(11 * 16 - 3))
    listed = rows.look_up(copied(directory_of(16, 1, 1), device), 1, gpu.look_up, device)
    assert rows.within(listed.pages) == [0, 1, 8, 9, 10]
    assert rows.within(listed.tokens) == [16, 16, 16, 16, 13]
    check_look_up(directory_of(16, 1, 1), replace(rows, first_page=0, candidates=ints(0)), 1, device)


def test_candidates_are_counted_from_the_first_page_on(device: torch.device) -> None:
    rows = listing([[[3, 0]]], first_page=4)
    listed = rows.look_up(copied(directory_of(16, 1, 1), device), 1, gpu.look_up, device)
    assert rows.within(listed.pages) == [7, 4]


@pytest.mark.parametrize("pages_per_block", [1, 2, 8])
def test_pages_lie_in_the_blocks_of_a_row(pages_per_block: int, device: torch.device) -> None:
    table = torch.randperm(32 // pages_per_block)[: 16 // pages_per_block].int()
    rows = listing([[list(range(16))]], blocks=table[None], pages_per_block=pages_per_block, store_pages=32)
    listed = rows.look_up(copied(directory_of(32, 1, 1), device), 1, gpu.look_up, device)
    wanted = [int(table[page // pages_per_block]) * pages_per_block + page % pages_per_block for page in range(16)]
    assert rows.within(listed.pages) == wanted


@pytest.mark.parametrize("most", [127, 128, 129, 300])
def test_more_pages_than_a_program_takes(most: int, device: torch.device) -> None:
    order = torch.stack([torch.randperm(300) for _ in range(4)]).view(2, 2, 300)
    rows = Rows(
        blocks=torch.stack([torch.randperm(300) for _ in range(2)]).int(),
        seq_lens=ints(4800, 4790),
        counts=ints([most, 5], [126, most]),
        order=order,
        candidates=ints(0, 0),
        first_page=0,
        most=most,
        pages_per_block=1,
        store_pages=300,
    )
    directory = directory_of(600, 500, 200, held={slot: slot + 20 for slot in range(100)}, reserve=range(300, 500))
    _, after = check_look_up(directory, rows, 3, device)
    assert int(after.cursor) > 100
    check_turn(after, device, step=4, hand=450, window=300)


def test_nothing_is_written_behind_the_counts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor looked at: there are no such pages."""
    rows = listing([[[1, 2, 3], []], [[], [1]]])
    assert rows.order is not None
    rows.order[torch.arange(3) >= rows.counts[..., None]] = 2**40
    monkeypatch.setattr(torch, "empty", lambda *sizes, **kinds: torch.full(sizes, POISON, **kinds))
    listed = rows.look_up(copied(directory_of(64, 4, 2, reserve=[0]), device), 1, gpu.look_up, device)
    behind = torch.arange(3) >= rows.counts[..., None]
    for part in listed:
        assert (part.cpu()[behind] == POISON).all()
        assert (part.cpu()[~behind] != POISON).all()


def test_tables_and_orders_may_be_strided(device: torch.device) -> None:
    rows = listing([[[1, 2], [5, 0]], [[7, 1], [2, 3]]])
    assert rows.order is not None
    order = torch.full((2, 3, 4, 9), 2**40, dtype=torch.int64)
    order[:, 1, 1:3, 2:4] = rows.order
    blocks = torch.full((2, 40), 2**31 - 1, dtype=torch.int32)
    blocks[:, 5:21] = rows.blocks
    strided = replace(rows, order=order[:, 1, 1:3, 2:9], blocks=blocks[:, 5:21])
    directory = directory_of(64, 8, 8, held={3: 1, 1: 34}, reserve=[0, 2, 4, 5])
    slots, dense_slots = (check_look_up(directory, listed, 2, device)[0] for listed in (strided, rows))
    assert [max(slot, -1) for slot in slots] == [max(slot, -1) for slot in dense_slots]
    if device == CPU:  # elsewhere programs race for the places of the reserve
        assert slots == dense_slots


@pytest.mark.parametrize("pages", [[[[], []]], [[[], [1]]]])
def test_groups_that_list_nothing(pages: list[list[list[int]]], device: torch.device) -> None:
    check_look_up(directory_of(32, 2, 1), listing(pages), 1, device)


def test_no_rows_and_no_pages_are_no_work(device: torch.device) -> None:
    rows = listing([[[1]]])
    none = replace(rows, blocks=rows.blocks[:0], seq_lens=ints(), candidates=ints(), counts=rows.counts[:0], order=None)
    directory = directory_of(16, 2, 1)
    assert check_look_up(directory, none, 1, device)[0] == []
    assert check_look_up(directory, replace(rows, most=0, counts=ints([0])), 1, device)[0] == []
    for name in ("set_aside", "give_back"):
        check_same(name, directory, device, ints(), 2)
        check_same(name, directory, device, ints(1), 0)
    check_same("forget", directory, device, torch.empty(0, dtype=torch.int64), store_pages=8, heads=2)


def stamped(*stamps: int, room: int) -> PageDirectory:
    """Slots that hold a page each unless they are free, with these stamps."""
    held = {slot: slot for slot, stamp in enumerate(stamps) if stamp != FREE}
    directory = directory_of(len(stamps), len(stamps), room, held=held)
    directory.used[:] = ints(*stamps)
    return directory


def test_free_slots_go_first_then_those_read_longest_ago(device: torch.device) -> None:
    turned = check_turn(stamped(3, 5, FREE, 1, 5, FREE, room=4), device, step=9, hand=0, window=6)
    assert turned.reserve.tolist() == [2, 5, 3, 0]
    assert turned.slots.tolist() == [NOWHERE, 1, NOWHERE, NOWHERE, 4, NOWHERE]


def test_what_was_read_in_the_last_step_stays(device: torch.device) -> None:
    turned = check_turn(stamped(8, 7, 8, 8, room=3), device, step=9, hand=0, window=4)
    assert turned.reserve.tolist() == [1, -1, -1]


def test_the_window_goes_round_and_nothing_outside_it_is_taken(device: torch.device) -> None:
    directory = stamped(1, 1, 1, 1, 1, 1, room=4)
    turned = check_turn(directory, device, step=9, hand=5, window=3)
    assert turned.reserve.tolist() == [5, 0, 1, -1]
    assert check_turn(turned, device, step=10, hand=2, window=1).reserve.tolist() == [5, 0, 1, 2]


def test_a_reserve_larger_than_the_pool_takes_what_there_is(device: torch.device) -> None:
    assert check_turn(stamped(1, FREE, 1, room=5), device, step=9, hand=1, window=3).reserve.tolist() == [
        1,
        2,
        0,
        -1,
        -1,
    ]


def test_a_forgotten_page_frees_its_slots_in_all_layers_and_heads(device: torch.device) -> None:
    directory = directory_of(4 * 8, 6, 2, held={0: 3, 1: 8 + 3, 4: 24 + 3, 2: 4}, reserve=[5])
    after = check_same("forget", directory, device, torch.tensor([3, 3, 7]), store_pages=8, heads=4)
    assert after.pages.tolist() == [NOTHING, NOTHING, 4, NOTHING, NOTHING, NOTHING]
    assert after.used.tolist() == [FREE, FREE, 1, FREE, FREE, IN_RESERVE]
    many = directory_of(300 * 2, 4, 1, held={0: 2 * 299 + 1, 1: 1, 2: 2 * 128})
    assert check_same("forget", many, device, torch.tensor([1]), store_pages=2, heads=300).pages.tolist() == [
        -1,
        -1,
        256,
        -1,
    ]


def test_slots_set_aside_hold_nothing_and_leave_the_reserve(device: torch.device) -> None:
    directory = directory_of(16, 8, 3, held={1: 4, 2: 9, 7: 5}, reserve=[6, 3, 0])
    after = check_same("set_aside", directory, device, ints(2, 6), 2)
    assert after.used.tolist() == [IN_RESERVE, 1, SET_ASIDE, SET_ASIDE, FREE, FREE, SET_ASIDE, SET_ASIDE]
    assert after.reserve.tolist() == [-1, -1, 0]
    assert after.slots[[4, 9, 5]].tolist() == [1, NOWHERE, NOWHERE]
    turned = check_turn(after, device, step=2, hand=0, window=8)
    assert turned.reserve.tolist() == [4, 5, 0]
    given = check_same("give_back", turned, device, ints(6), 2)
    assert given.used[6:].tolist() == [FREE, FREE]


def test_a_page_arriving_in_a_slot_that_is_set_aside_lies_nowhere(device: torch.device) -> None:
    _, after = check_look_up(directory_of(16, 4, 2, reserve=[1, 2]), listing([[[8, 9]]]), 1, device)
    taken = check_same("set_aside", after, device, ints(2), 1)
    assert check_turn(taken, device, step=2, hand=0, window=4).slots[[8, 9]].tolist() == [1, NOWHERE]


def test_runs_longer_than_a_program_takes(device: torch.device) -> None:
    directory = directory_of(600, 700, 1, held={slot: slot for slot in range(600)})
    after = check_same("set_aside", directory, device, ints(300, 10), 257)
    assert (after.used == SET_ASIDE).sum() == 2 * 257


def test_integrity_names_what_is_wrong() -> None:
    def broken(**changed: tuple[int, int]) -> PageDirectory:
        directory = directory_of(16, 6, 2, held={0: 3, 1: 4}, reserve=[2, 5])
        for name, (place, value) in changed.items():
            getattr(directory, name)[place] = value
        return directory

    check_integrity(broken())
    for message, wrong in (
        ("different pairs", broken(slots=(7, 3))),
        ("different pairs", broken(pages=(3, 9), used=(3, 1))),
        ("two pages|different pairs", broken(slots=(7, 0))),
        ("twice", broken(reserve=(1, 2))),
        ("the reserve and the stamps", broken(reserve=(1, -1))),
        ("slot 3 of stamp 5: holds -1", broken(used=(3, 5))),
        ("slot 0 of stamp 2147483647: holds 3", broken(used=(0, SET_ASIDE))),
        ("arrivals and entries", broken(slots=(7, ARRIVING))),
        ("neither of the two marks", broken(slots=(7, -3))),
    ):
        with pytest.raises(AssertionError, match=message):
            check_integrity(wrong)


def bad_arguments() -> list[tuple[str, dict[str, Any], str]]:
    return [
        ("counts of other heads", {"counts": torch.ones(2, 3).int()}, r"counts=\[2, 3\].*must be \[any, 2\]"),
        ("counts of int64", {"counts": torch.ones(2, 2).long()}, "counts=.*int64"),
        ("blocks of other rows", {"blocks": torch.zeros(3, 4).int()}, r"blocks=\[3, 4\]"),
        ("blocks apart", {"blocks": torch.zeros(2, 8).int()[:, ::2]}, "blocks=.*contiguous"),
        ("seq_lens of int64", {"seq_lens": torch.ones(2).long()}, "seq_lens=.*int64"),
        ("candidates of other rows", {"candidates": torch.ones(3).int()}, r"candidates=\[3\]"),
        ("order of int32", {"order": torch.zeros(2, 2, 4).int()}, "order=.*int32"),
        ("order apart", {"order": torch.zeros(2, 2, 8).long()[..., ::2]}, "order=.*contiguous"),
        ("order too short", {"most": 5}, "most=5: must be at most 4"),
        ("order elsewhere", {"order": torch.zeros(2, 2, 4, device="meta").long()}, "order=.*on meta"),
        ("no first page", {"first_page": -1}, "first_page=-1: must be at least 0"),
        ("less than nothing", {"most": -1}, "most=-1"),
        ("blocks of no pages", {"pages_per_block": 0}, "pages_per_block=0: must be at least 1"),
        ("a store of less than nothing", {"store_pages": -1}, "store_pages=-1"),
        ("a layer behind the last", {"first_entry": 33}, r"first_entry=33: must be 0 to 32"),
        ("a layer before the first", {"first_entry": -1}, "first_entry=-1"),
    ]


@pytest.mark.parametrize(("changed", "message"), [pytest.param(*case[1:], id=case[0]) for case in bad_arguments()])
def test_bad_arguments_of_look_up_are_refused_by_name(changed: dict[str, Any], message: str) -> None:
    arguments = {
        "blocks": torch.zeros(2, 4).int(),
        "seq_lens": torch.ones(2).int(),
        "candidates": torch.zeros(2).int(),
        "counts": torch.zeros(2, 2).int(),
        "order": torch.zeros(2, 2, 4).long(),
        "first_page": 0,
        "most": 4,
        "pages_per_block": 1,
        "store_pages": 16,
        "first_entry": 0,
        "kv_heads": 2,
    }
    with pytest.raises(KernelError, match=message):
        gpu.look_up(directory_of(64, 4, 2), **(arguments | changed))


def test_other_bad_arguments_are_refused_by_name() -> None:
    directory = directory_of(64, 4, 2)
    for message, call in (
        ("step=0: must be 1 to 2147483645", lambda: gpu.turn_over(directory, step=0, hand=0, window=1)),
        ("step=2147483646", lambda: gpu.turn_over(directory, step=IN_RESERVE, hand=0, window=1)),
        ("hand=4: must be 0 to 3", lambda: gpu.turn_over(directory, step=1, hand=4, window=1)),
        ("window=5: must be 1 to 4", lambda: gpu.turn_over(directory, step=1, hand=0, window=5)),
        ("window=0", lambda: gpu.turn_over(directory, step=1, hand=0, window=0)),
        ("pages=.*int32", lambda: gpu.forget(directory, ints(1), store_pages=16, heads=4)),
        ("heads=3: times", lambda: gpu.forget(directory, ints(1).long(), store_pages=16, heads=3)),
        ("firsts=.*int64", lambda: gpu.set_aside(directory, ints(1).long(), 1)),
        ("length=5: must be 0 to 4", lambda: gpu.give_back(directory, ints(0), 5)),
        ("room=0: must be above 0", lambda: PageDirectory.empty(4, 2, 0, CPU)),
        ("capacity=0: must be above 0", lambda: PageDirectory.empty(4, 0, 2, CPU)),
        (r"used=\[4\] int64", lambda: replace(directory, used=directory.used.long())),
        (r"arrivals=\[3\]", lambda: replace(directory, arrivals=torch.zeros(3, dtype=torch.int64))),
    ):
        with pytest.raises(KernelError, match=message):
            call()
