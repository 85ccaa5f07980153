"""The page directory in plain loops, one page at a time, over tensors in CPU memory.

Where a kernel's programs run one after another, as Triton's interpreter has them, it does exactly this. On a device
they ask for places of the reserve in any order, so which of them a page gets is open, and so is, where more are asked
for than there are, which pages get one and by how much `cursor` is above `room`.
"""

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.page_directory.state import (
    ARRIVING,
    FREE,
    IN_RESERVE,
    NOTHING,
    NOWHERE,
    SET_ASIDE,
    Listed,
    PageDirectory,
)
from vllm_hybrid_sparse.values import PAGE_TOKENS


def look_up(
    directory: PageDirectory,
    blocks: Tensor,
    seq_lens: Tensor,
    candidates: Tensor,
    counts: Tensor,
    order: Tensor | None,
    *,
    first_page: int,
    most: int,
    pages_per_block: int,
    store_pages: int,
    first_entry: int,
    kv_heads: int,
) -> Listed:
    """List pages and say where they lie; arguments as in gpu.py. Behind the counts: -1, 0 and 0."""
    rows = len(counts)
    listed = Listed(*(torch.full((rows, kv_heads, most), empty, dtype=torch.int32) for empty in (-1, 0, 0)))
    for row in range(rows):
        for kv_head in range(kv_heads):
            for place in range(int(counts[row, kv_head])):
                if order is not None:
                    page = first_page + int(order[row, kv_head, place])
                else:
                    page = place if place < first_page else place + int(candidates[row])
                block = int(blocks[row, page // pages_per_block])
                store_page = block * pages_per_block + page % pages_per_block
                tokens = min(int(seq_lens[row]) - page * PAGE_TOKENS, PAGE_TOKENS)
                may_arrive = tokens == PAGE_TOKENS
                slot = _look_up_one(directory, first_entry + kv_head * store_pages + store_page, may_arrive)
                for part, value in zip(listed, (slot, store_page, tokens), strict=True):
                    part[row, kv_head, place] = value
    return listed


def _look_up_one(directory: PageDirectory, entry: int, may_arrive: bool) -> int:
    """The page's slot as `Listed` has it; where it lies in none and may arrive, a place of the reserve is drawn."""
    slot = int(directory.slots[entry])
    if slot >= 0:
        directory.used[slot] = directory.clock[0]
        return slot
    if slot == ARRIVING or not may_arrive:
        return -1
    place = int(directory.cursor)
    directory.cursor.add_(1)
    if place >= directory.room:
        return -1
    directory.slots[entry] = ARRIVING
    directory.arrivals[place] = entry
    given = int(directory.reserve[place])
    return -1 if given == NOTHING else -2 - given


def turn_over(directory: PageDirectory, *, step: int, hand: int, window: int) -> None:
    """Publish what arrived in the last step and fill the reserve; arguments as in gpu.py."""
    for place in range(min(int(directory.cursor), directory.room)):
        entry, slot = int(directory.arrivals[place]), int(directory.reserve[place])
        directory.slots[entry] = NOWHERE
        if slot != NOTHING:
            directory.slots[entry] = slot
            directory.pages[slot] = entry
            directory.used[slot] = step - 1
        directory.reserve[place] = NOTHING
    directory.cursor[0], directory.clock[0] = 0, step

    seen = [(hand + i) % directory.capacity for i in range(window)]
    oldest = iter(sorted(seen, key=lambda slot: int(directory.used[slot])))
    for place in range(directory.room):
        if int(directory.reserve[place]) != NOTHING:
            continue
        slot = next(oldest, NOTHING)
        if slot == NOTHING or int(directory.used[slot]) >= step - 1:
            break  # and so are all that come behind it
        _empty(directory, slot, IN_RESERVE)
        directory.reserve[place] = slot


def forget(directory: PageDirectory, pages: Tensor, *, store_pages: int, heads: int) -> None:
    """Have pages lie nowhere, in all layers and KV heads; arguments as in gpu.py."""
    for page in pages.tolist():
        for head in range(heads):
            slot = int(directory.slots[head * store_pages + page])
            if slot >= 0:
                _empty(directory, slot, FREE)


def set_aside(directory: PageDirectory, firsts: Tensor, length: int) -> None:
    """Have runs of slots serve something else; arguments as in gpu.py."""
    for first in firsts.tolist():
        for slot in range(first, first + length):
            _empty(directory, slot, SET_ASIDE)
            directory.reserve[directory.reserve == slot] = NOTHING


def give_back(directory: PageDirectory, firsts: Tensor, length: int) -> None:
    """Have runs of slots in use again; arguments as in gpu.py."""
    for first in firsts.tolist():
        for slot in range(first, first + length):
            _empty(directory, slot, FREE)


def _empty(directory: PageDirectory, slot: int, stamp: int) -> None:
    entry = int(directory.pages[slot])
    if entry != NOTHING:
        directory.slots[entry] = NOWHERE
    directory.pages[slot] = NOTHING
    directory.used[slot] = stamp


def check_integrity(directory: PageDirectory) -> None:
    """AssertionError where a slot is lost or has two roles, or entries and slots name different pairs.

    At any time between two calls: pages that arrive are told by `arrivals` and `cursor`. Waits for the device.
    """
    slots, pages, used = (part.tolist() for part in (directory.slots, directory.pages, directory.used))
    reserve = [slot for slot in directory.reserve.tolist() if slot != NOTHING]
    of_entries = {slot: entry for entry, slot in enumerate(slots) if slot >= 0}
    of_slots = {slot: entry for slot, entry in enumerate(pages) if entry != NOTHING}
    assert of_entries == of_slots, "entries and slots name different pairs"
    assert len(of_entries) == sum(slot >= 0 for slot in slots), "a slot holds two pages"

    assert len(set(reserve)) == len(reserve), "a slot stands in the reserve twice"
    stamped = [slot for slot, stamp in enumerate(used) if stamp == IN_RESERVE]
    assert sorted(reserve) == stamped, "the reserve and the stamps name different slots"
    for slot, stamp in enumerate(used):
        is_held = slot in of_slots
        assert is_held == (FREE < stamp < IN_RESERVE), f"slot {slot} of stamp {stamp}: holds {pages[slot]}"

    drawn = min(int(directory.cursor), directory.room)
    arrivals = directory.arrivals[:drawn].tolist()
    arriving = [entry for entry, slot in enumerate(slots) if slot == ARRIVING]
    assert sorted(arrivals) == arriving, "arrivals and entries name different pages"
    assert min(slots, default=NOWHERE) >= ARRIVING, "an entry is no slot, and neither of the two marks"
