"""Page directories and what rows read, on the CPU; kernels and reference are run on them and compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.page_directory import gpu, reference
from vllm_hybrid_sparse.kernels.page_directory.reference import check_integrity
from vllm_hybrid_sparse.kernels.page_directory.state import IN_RESERVE, Listed, PageDirectory

CPU = torch.device("cpu")


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def copied(directory: PageDirectory, device: torch.device) -> PageDirectory:
    return PageDirectory(*(getattr(directory, field.name).to(device, copy=True) for field in fields(PageDirectory)))


def assert_equal(actual: PageDirectory, expected: PageDirectory) -> None:
    """In all that is looked at: arrivals below the cursor only."""
    drawn = min(int(expected.cursor), expected.room)
    for field in fields(PageDirectory):
        mine, theirs = getattr(actual, field.name).cpu(), getattr(expected, field.name)
        if field.name == "arrivals":
            mine, theirs = mine[:drawn], theirs[:drawn]
        assert torch.equal(mine, theirs), field.name


def directory_of(
    entries: int, capacity: int, room: int, *, held: dict[int, int] | None = None, reserve: Sequence[int] = ()
) -> PageDirectory:
    """On the CPU: pages in slots, {slot: entry}, read last in step 1, and slots in the reserve, -1: none."""
    directory = PageDirectory.empty(entries, capacity, room, CPU)
    for slot, entry in (held or {}).items():
        directory.slots[entry], directory.pages[slot], directory.used[slot] = slot, entry, 1
    for place, slot in enumerate(reserve):
        directory.reserve[place] = slot
        if slot >= 0:
            directory.used[slot] = IN_RESERVE
    check_integrity(directory)
    return directory


@dataclass
class Rows:
    """What rows read in one layer, on the CPU."""

    blocks: Tensor
    seq_lens: Tensor
    counts: Tensor
    order: Tensor | None
    candidates: Tensor
    first_page: int
    most: int
    pages_per_block: int
    store_pages: int
    first_entry: int = 0

    def look_up(
        self, directory: PageDirectory, step: int, by: Callable[..., Listed], device: torch.device = CPU
    ) -> Listed:
        directory.clock.fill_(step)
        return by(
            directory,
            at(self.blocks, device),
            self.seq_lens.to(device),
            self.candidates.to(device),
            self.counts.to(device),
            None if self.order is None else at(self.order, device),
            first_page=self.first_page,
            most=self.most,
            pages_per_block=self.pages_per_block,
            store_pages=self.store_pages,
            first_entry=self.first_entry,
            kv_heads=self.counts.shape[1],
        )

    def within(self, part: Tensor) -> list[int]:
        """What a tensor of `Listed` says up to the counts."""
        return part.cpu()[torch.arange(self.most) < self.counts[..., None]].tolist()


def at(part: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides."""
    whole = part.as_strided((part.untyped_storage().nbytes() // part.element_size(),), (1,), 0).to(device, copy=True)
    return whole.as_strided(part.shape, part.stride(), part.storage_offset())


def listing(pages: Sequence[Sequence[Sequence[int]]], **changed: Any) -> Rows:
    """Rows and KV heads that list these pages of their request, whose blocks are the row's own and of one page.

    By default a row has 16 pages, all full: block b of row r is 16 r + b.
    """
    rows, most = len(pages), max((len(group) for row in pages for group in row), default=0)
    order = torch.zeros(rows, len(pages[0]), most, dtype=torch.int64)
    for row, groups in enumerate(pages):
        for head, group in enumerate(groups):
            order[row, head, : len(group)] = torch.tensor(group)
    simple = Rows(
        blocks=torch.arange(rows * 16, dtype=torch.int32).view(rows, 16),
        seq_lens=torch.full((rows,), 256, dtype=torch.int32),
        counts=torch.tensor([[len(group) for group in row] for row in pages], dtype=torch.int32),
        order=order,
        candidates=torch.zeros(rows, dtype=torch.int32),
        first_page=0,
        most=most,
        pages_per_block=1,
        store_pages=rows * 16,
    )
    return replace(simple, **changed)


def check_look_up(directory: PageDirectory, rows: Rows, step: int, device: torch.device) -> tuple[list[int], Any]:
    """Look up by the kernel and the reference; the slots listed, and the directory as the kernel left it, on the CPU.

    Which place of the reserve a page gets, and whether it gets one of the last, is exact where programs run in turn.
    """
    expected, actual = copied(directory, CPU), copied(directory, device)
    theirs, mine = rows.look_up(expected, step, reference.look_up), rows.look_up(actual, step, gpu.look_up, device)
    assert [part.shape for part in mine] == [part.shape for part in theirs]
    assert rows.within(mine.pages) == rows.within(theirs.pages)
    assert rows.within(mine.tokens) == rows.within(theirs.tokens)
    slots, there = rows.within(mine.slots), rows.within(theirs.slots)
    after = copied(actual, CPU)
    check_integrity(after)
    if device == CPU:
        assert slots == there
        assert_equal(actual, expected)
    else:
        assert [max(slot, -1) for slot in slots] == [max(slot, -1) for slot in there]
        assert torch.equal(after.used, expected.used)
        given = [-2 - slot for slot in slots if slot < -1]
        assert len(set(given)) == len(given) == sum(slot < -1 for slot in there)
        assert set(given) <= set(directory.reserve.tolist())
        assert (int(after.cursor) > after.room) == (int(expected.cursor) > expected.room)
        if int(expected.cursor) <= expected.room:
            assert torch.equal(after.slots, expected.slots)
    return slots, after


def check_turn(directory: PageDirectory, device: torch.device, **numbers: int) -> PageDirectory:
    """The directory as the kernels turned it over, on the CPU, which is as the reference does it."""
    return check_same("turn_over", directory, device, **numbers)


def check_same(name: str, directory: PageDirectory, device: torch.device, *args: Any, **numbers: int) -> PageDirectory:
    expected, actual = copied(directory, CPU), copied(directory, device)
    getattr(reference, name)(expected, *args, **numbers)
    getattr(gpu, name)(actual, *(part.to(device) if isinstance(part, Tensor) else part for part in args), **numbers)
    assert_equal(actual, expected)
    check_integrity(expected)
    return copied(actual, CPU)
