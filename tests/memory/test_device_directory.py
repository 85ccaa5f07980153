"""The directory that a device keeps, step by step: a page found in a slot has the host store's content."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from numpy.typing import NDArray
from torch import Tensor

from tests.kernels.device.interpreter import interprets, mend_interpreter
from vllm_hybrid_sparse.kernels.page_directory.reference import check_integrity
from vllm_hybrid_sparse.memory.device_directory import DeviceDirectory
from vllm_hybrid_sparse.values import PAGE_TOKENS

CPU = torch.device("cpu")
LAYERS, KV_HEADS, BLOCKS, PAGES_PER_BLOCK = 2, 2, 10, 2
BLOCK_TOKENS = PAGES_PER_BLOCK * PAGE_TOKENS
FIRST_PAGE = 1  # of the candidates
RUN = 3  # slots that are set aside together


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not interprets():
        pytest.skip("the kernels are compiled in this run")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the interpreter reads it again at its first launch
    mend_interpreter()


def make_directory(capacity: int, room: int | None = None, window: int | None = None) -> DeviceDirectory:
    pages = BLOCKS * PAGES_PER_BLOCK
    return DeviceDirectory(LAYERS, KV_HEADS, pages, PAGES_PER_BLOCK, capacity, device=CPU, room=room, window=window)


@dataclass
class Request:
    blocks: list[int]
    tokens: int

    @property
    def pages(self) -> list[int]:
        """The request's pages of the host store, in order."""
        return [self.page(number) for number in range(-(-self.tokens // PAGE_TOKENS))]

    def page(self, number: int) -> int:
        return self.blocks[number // PAGES_PER_BLOCK] * PAGES_PER_BLOCK + number % PAGES_PER_BLOCK

    @property
    def candidates(self) -> int:
        """The number of candidates: all pages but the first and the last two."""
        return max(0, len(self.pages) - 3)


@dataclass
class Content:
    """What lies in the host store and in the slots: versions, which change with every write."""

    host: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BLOCKS * PAGES_PER_BLOCK, dtype=np.int64))
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)  # entry and version

    def attend(self, entry: int, slot: int) -> None:
        """Read a page as it was listed, and put it into the slot that it was given."""
        version = int(self.host[entry % len(self.host)])
        if slot >= 0:
            assert self.slots[slot] == (entry, version), "a slot holds another page, or what the page was once"
        if slot < -1:
            self.slots[-2 - slot] = entry, version


def look_up(
    directory: DeviceDirectory, layer: int, rows: Sequence[Request], order: Tensor | None, counts: Tensor
) -> list[tuple[int, int]]:
    """Look pages up, check the listed pages and tokens, and return entries and slots of what is listed."""
    blocks = torch.full((len(rows), BLOCKS), 2**31 - 1, dtype=torch.int32)
    for row, request in enumerate(rows):
        blocks[row, : len(request.blocks)] = torch.tensor(request.blocks)
    listed = directory.look_up(
        layer,
        blocks,
        torch.tensor([request.tokens for request in rows], dtype=torch.int32),
        torch.tensor([request.candidates for request in rows], dtype=torch.int32),
        counts,
        order,
        first_page=FIRST_PAGE,
        most=int(counts.max()) if len(rows) else 0,
    )
    found = []
    for row, request in enumerate(rows):
        for head in range(KV_HEADS):
            count = int(counts[row, head])
            if order is not None:
                numbers = [FIRST_PAGE + number for number in order[row, head, :count].tolist()]
            else:
                numbers = [place + (place >= FIRST_PAGE) * request.candidates for place in range(count)]
            pages = [request.page(number) for number in numbers]
            assert listed.pages[row, head, :count].tolist() == pages
            tokens = [min(PAGE_TOKENS, request.tokens - PAGE_TOKENS * number) for number in numbers]
            assert listed.tokens[row, head, :count].tolist() == tokens
            first_entry = (layer * KV_HEADS + head) * BLOCKS * PAGES_PER_BLOCK
            slots = listed.slots[row, head, :count].tolist()
            assert all(slot >= -1 for slot, held in zip(slots, tokens, strict=True) if held < PAGE_TOKENS)
            found += [(first_entry + page, slot) for page, slot in zip(pages, slots, strict=True)]
    return found


def retained(rows: Sequence[Request]) -> Tensor:
    counts = [len(request.pages) - request.candidates for request in rows]
    return torch.tensor(counts, dtype=torch.int32)[:, None].repeat(1, KV_HEADS)


class DirectoryStates(RuleBasedStateMachine):
    """Requests come, share the whole blocks of others, decode and leave; frames take slots and give them back."""

    @initialize(data=st.data(), capacity=st.integers(1, 60))
    def begin(self, data: st.DataObject, capacity: int) -> None:
        room = data.draw(st.none() | st.integers(1, 40))
        window = data.draw(st.none() | st.integers(1, capacity))
        self.directory = make_directory(capacity, room, window)
        self.content = Content()
        self.requests: list[Request] = []
        self.written: list[int] = []  # pages whose content changed since the last step
        self.aside: list[int] = []  # first slots of runs

    @property
    def free(self) -> list[int]:
        used = {block for request in self.requests for block in request.blocks}
        return [block for block in range(BLOCKS) if block not in used]

    def write(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.content.host[page] += 1

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """A new request, whose prompt may begin with whole blocks of another."""
        shared: list[int] = []
        if self.requests:
            other = data.draw(st.sampled_from(self.requests))
            shared = other.blocks[: data.draw(st.integers(0, other.tokens // BLOCK_TOKENS))]
        own = self.free[: data.draw(st.integers(1, 4))]
        tokens = len(own) * BLOCK_TOKENS - data.draw(st.integers(0, BLOCK_TOKENS - 1))
        request = Request(shared + own, len(shared) * BLOCK_TOKENS + tokens)
        self.requests.append(request)
        pages = request.pages[len(shared) * PAGES_PER_BLOCK :]
        self.write(pages)
        self.written += pages

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A request leaves without telling the directory. Its blocks are the next to be written."""
        self.requests.remove(data.draw(st.sampled_from(self.requests)))

    @rule(data=st.data(), decoding=st.integers(0, 3), steps=st.integers(1, 4))
    def decode(self, data: st.DataObject, decoding: int, steps: int) -> None:
        """Decode a few tokens of some requests."""
        for _ in range(steps):
            self.step(data, decoding)

    def step(self, data: st.DataObject, decoding: int) -> None:
        rows = self.requests[:decoding] if data.draw(st.booleans()) else self.requests[::-1][:decoding]
        rows = [request for request in rows if self.append(request)]
        self.directory.begin_step(self.written)
        self.written = []
        self.check()
        self.frames(data)
        given: list[int] = []
        for layer in range(LAYERS):
            order, counts = self.ranked(data, rows)
            listed = look_up(self.directory, layer, rows, None, retained(rows))
            listed += look_up(self.directory, layer, rows, order, counts)
            for entry, slot in listed:
                self.content.attend(entry, slot)
                assert all(not first <= max(slot, -2 - slot) < first + RUN for first in self.aside)
            given += [-2 - slot for _, slot in listed if slot < -1]
            check_integrity(self.directory.state)
        assert len(set(given)) == len(given)

    def append(self, request: Request) -> bool:
        """Append one token if there is a block for it. If it begins a page, that page is written anew."""
        if request.tokens == len(request.blocks) * BLOCK_TOKENS:
            if not self.free:
                return False
            request.blocks.append(self.free[0])
        request.tokens += 1
        self.write(request.pages[-1:])
        if request.tokens % PAGE_TOKENS == 1:
            self.written += request.pages[-1:]
        return True

    @staticmethod
    def ranked(data: st.DataObject, rows: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """An order over the candidates of each group, and how many of them are read."""
        random = np.random.default_rng(data.draw(st.integers(0, 99)))
        order = torch.full((len(rows), KV_HEADS, BLOCKS * PAGES_PER_BLOCK), 2**40)
        counts = torch.zeros(len(rows), KV_HEADS, dtype=torch.int32)
        for row, request in enumerate(rows):
            for head in range(KV_HEADS):
                order[row, head, : request.candidates] = torch.from_numpy(random.permutation(request.candidates))
                counts[row, head] = int(random.integers(request.candidates + 1))
        return order, counts

    def frames(self, data: st.DataObject) -> None:
        """Set runs aside and give others back."""
        back = data.draw(st.lists(st.sampled_from(self.aside), unique=True)) if self.aside else []
        self.directory.give_back(np.array(back, dtype=np.int32), min(RUN, self.directory.state.capacity))
        self.aside = [first for first in self.aside if first not in back]
        unused = [first for first in range(0, self.directory.state.capacity - RUN + 1, RUN) if first not in self.aside]
        runs = data.draw(st.lists(st.sampled_from(unused), max_size=2, unique=True)) if unused else []
        if runs:
            assert self.directory.set_aside(np.array(runs, dtype=np.int32), RUN).tolist() == [True] * len(runs)
        self.aside += runs
        for first in runs:
            for slot in range(first, first + RUN):
                self.content.slots.pop(slot, None)
        self.check()

    def check(self) -> None:
        check_integrity(self.directory.state)
        assert int(self.directory.state.cursor) == 0
        for slot, entry in enumerate(self.directory.state.pages.tolist()):
            if entry >= 0:
                version = int(self.content.host[entry % len(self.content.host)])
                assert self.content.slots[slot] == (entry, version), f"slot {slot} is stale"


TestDirectoryStates = DirectoryStates.TestCase
TestDirectoryStates.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def read_all(directory: DeviceDirectory, content: Content, rows: Sequence[Request]) -> list[int]:
    """Run a step that reads every page of the rows and writes none; return the slots as they were listed."""
    directory.begin_step([])
    slots = []
    for layer in range(LAYERS):
        candidates = torch.tensor([request.candidates for request in rows], dtype=torch.int32)
        order = torch.arange(BLOCKS * PAGES_PER_BLOCK).expand(len(rows), KV_HEADS, -1)
        counts = candidates[:, None].repeat(1, KV_HEADS)
        listed = look_up(directory, layer, rows, None, retained(rows)) + look_up(directory, layer, rows, order, counts)
        for entry, slot in listed:
            content.attend(entry, slot)
        slots += [slot for _, slot in listed]
    check_integrity(directory.state)
    return slots


ROWS = (Request([3, 1, 4, 7], 4 * BLOCK_TOKENS), Request([3, 1, 0, 2], 4 * BLOCK_TOKENS))
DIFFERENT = LAYERS * KV_HEADS * PAGES_PER_BLOCK * 6  # pages of the two rows, which share two blocks


def test_what_fits_the_pool_and_the_reserve_is_found_in_the_second_step() -> None:
    directory, content = make_directory(8 * DIFFERENT), Content()
    first = read_all(directory, content, ROWS)
    assert sum(slot < -1 for slot in first) == DIFFERENT
    assert min(read_all(directory, content, ROWS)) >= 0


def test_what_fits_the_pool_is_found_as_soon_as_the_reserve_has_given_slots() -> None:
    directory, content = make_directory(2 * DIFFERENT, room=DIFFERENT // 2), Content()
    given = [sum(slot < -1 for slot in read_all(directory, content, ROWS)) for _ in range(2)]
    assert given == [DIFFERENT // 2] * 2
    for _ in range(3):
        assert min(read_all(directory, content, ROWS)) >= 0


def test_of_more_than_the_pool_holds_the_same_pages_are_found_in_every_step() -> None:
    """No page that was read in the last step makes room, so layers do not evict each other's pages."""
    directory, content = make_directory(DIFFERENT // 2, room=4), Content()
    for _ in range(12):
        read_all(directory, content, ROWS)
    steady = [read_all(directory, content, ROWS) for _ in range(3)]
    assert steady[0] == steady[1] == steady[2]
    assert len({slot for slot in steady[0] if slot >= 0}) >= DIFFERENT // 2 - 4


def test_a_page_that_is_read_no_more_makes_room() -> None:
    directory, content = make_directory(40, room=8, window=40), Content()
    for _ in range(8):
        read_all(directory, content, ROWS[:1])
    for _ in range(8):
        slots = read_all(directory, content, ROWS[1:])
    assert min(slots) >= 0


def test_written_pages_are_found_no_more() -> None:
    directory, content = make_directory(8 * DIFFERENT), Content()
    read_all(directory, content, ROWS)
    read_all(directory, content, ROWS)
    directory.begin_step([ROWS[0].page(7), ROWS[0].page(2), ROWS[0].page(3)])
    found = look_up(directory, 1, ROWS[:1], torch.arange(5).expand(1, KV_HEADS, -1), torch.full((1, 2), 5).int())
    assert [slot >= 0 for _, slot in found[:5]] == [True, False, False, True, True]
    found = look_up(directory, 1, ROWS[:1], None, torch.full((1, 2), 3).int())
    assert [slot >= 0 for _, slot in found[:3]] == [True, True, False]


def test_the_reserve_is_filled_beside_what_is_set_aside() -> None:
    directory = make_directory(64, room=4, window=4)
    directory.set_aside(np.array([0, 30], dtype=np.int32), 30)
    for filled in ([60, 61, 62, 63], [60, 61, 62, 63]):
        directory.begin_step([])
        assert directory.state.reserve.tolist() == filled
    directory.give_back(np.array([30], dtype=np.int32), 30)
    directory.set_aside(np.array([60], dtype=np.int32), 4)
    directory.begin_step([])
    assert directory.state.reserve.tolist() == [30, 31, 32, 33]
    directory.set_aside(np.array([34], dtype=np.int32), 26)
    directory.set_aside(np.array([30], dtype=np.int32), 4)
    directory.begin_step([])
    assert directory.state.reserve.tolist() == [-1] * 4
    check_integrity(directory.state)


def test_the_hand_begins_anew_where_the_end_of_the_pool_is_set_aside() -> None:
    directory = make_directory(8, room=1, window=2)
    directory.set_aside(np.array([2], dtype=np.int32), 6)
    directory.begin_step([])
    assert directory.state.reserve.tolist() == [0]
    directory.set_aside(np.array([0], dtype=np.int32), 1)
    directory.begin_step([])
    assert directory.state.reserve.tolist() == [1]


def test_the_hand_goes_round_the_pool() -> None:
    directory, hands = make_directory(10, room=10, window=4), []
    for _ in range(3):
        directory.begin_step([])
        hands.append((directory.state.reserve >= 0).sum().item())
    assert hands == [4, 8, 10]


@pytest.mark.parametrize(("capacity", "room"), [(1, 1), (15, 1), (16, 2), (80, 10), (100_000, 4096)])
def test_an_eighth_of_a_pool_is_kept_empty_up_to_a_limit(capacity: int, room: int) -> None:
    directory = make_directory(capacity)
    assert directory.state.room == room
    assert (directory.state.capacity, directory.state.entries) == (capacity, LAYERS * KV_HEADS * 20)


def test_slots_that_there_are_not_or_that_are_in_use_are_refused() -> None:
    directory = make_directory(8)
    with pytest.raises(IndexError, match="first=6: must be 0 to 5, 3 slots before the end"):
        directory.set_aside(np.array([5, 6], dtype=np.int32), 3)
    with pytest.raises(IndexError, match="first=-1"):
        directory.give_back(np.array([-1], dtype=np.int32), 1)
    directory.set_aside(np.array([5], dtype=np.int32), 3)
    with pytest.raises(ValueError, match="slot=4: is in use"):
        directory.give_back(np.array([4], dtype=np.int32), 3)
    assert not len(directory.set_aside(np.array([], dtype=np.int32), 3))
