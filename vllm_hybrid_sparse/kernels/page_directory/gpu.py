"""The page directory on the device: looked into by every layer, turned over once a step, and nothing waits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import check_tensor
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

_TILE = 128
"""Pages, places or slots of a program: one a thread, so that no atomic is done by two threads. Not tuned on a GPU."""

_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)
_NOWHERE = tl.constexpr(NOWHERE)
_ARRIVING = tl.constexpr(ARRIVING)
_NOTHING = tl.constexpr(NOTHING)
_IN_RESERVE = tl.constexpr(IN_RESERVE)
_SET_ASIDE = tl.constexpr(SET_ASIDE)


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
    """List the pages that decode rows are to read in one layer, and say where each lies: `look_up` of reference.py.

    A page that lies in no slot is given one of the reserve, if it is full and there is one left, and whoever reads it
    puts it there; every other reader of it in this step reads it on the host. Which pages get the last places is open
    where several programs ask at a time.

    What bounds it: scattered reads, of an entry a page, and a stamp written for each that is found.

    directory         in and out
    blocks            [rows, any]             int32, rows may be strided: the blocks of each row's request, trusted
    seq_lens          [rows]                  int32, tokens of each request; every page listed has one of them, trusted
    candidates        [rows]                  int32, pages of each request outside the retained set
    counts            [rows, kv_heads]        int32, pages that are listed of each group, trusted to be at most `most`
    order             [rows, kv_heads, any]   int64, the last dimension contiguous, at least `most`: the j-th page is
                                              the request's page first_page + order[j], each at most once a group; None:
                                              the retained set, whose j-th page is j before first_page, from there on
                                              j + candidates
    first_page        pages before the first candidate
    most              0 or more
    pages_per_block   page p of a request is page p % pages_per_block of its block p // pages_per_block
    store_pages       pages of the host store of one layer and KV head
    first_entry       layer * kv_heads * store_pages

    Raises KernelError for a tensor of another shape, dtype, device or stride, and for a number out of its range.
    """
    device = directory.slots.device
    check_tensor("counts", counts, torch.int32, (None, kv_heads), device)
    rows = counts.shape[0]
    check_tensor("blocks", blocks, torch.int32, (rows, None), device, strided_dims=1)
    check_tensor("seq_lens", seq_lens, torch.int32, (rows,), device)
    check_tensor("candidates", candidates, torch.int32, (rows,), device)
    if order is not None:
        check_tensor("order", order, torch.int64, (rows, kv_heads, None), device, strided_dims=2)
        if order.shape[2] < most:
            raise KernelError(f"most={most}: must be at most {order.shape[2]}, the pages of order")
    _check_not_below("first_page", first_page, 0)
    _check_not_below("most", most, 0)
    _check_not_below("pages_per_block", pages_per_block, 1)
    _check_not_below("store_pages", store_pages, 0)
    last = directory.entries - kv_heads * store_pages
    if not 0 <= first_entry <= last:
        raise KernelError(f"first_entry={first_entry}: must be 0 to {last}, {kv_heads} * {store_pages} before the end")

    listed = Listed(*(torch.empty(rows, kv_heads, most, dtype=torch.int32, device=device) for _ in Listed._fields))
    if listed.slots.numel() == 0:
        return listed
    _look_up_kernel[(rows, kv_heads, triton.cdiv(most, _TILE))](
        *listed,
        directory.slots,
        directory.used,
        directory.reserve,
        directory.arrivals,
        directory.cursor,
        directory.clock,
        blocks,
        seq_lens,
        candidates,
        counts,
        candidates if order is None else order,
        blocks.stride(0),
        0 if order is None else order.stride(0),
        0 if order is None else order.stride(1),
        first_page,
        most,
        pages_per_block,
        store_pages,
        first_entry,
        directory.room,
        ordered=order is not None,
        tile=_TILE,
    )
    return listed


def turn_over(directory: PageDirectory, *, step: int, hand: int, window: int) -> None:
    """Begin a step: what arrived in the last one is found from now on, and the reserve is filled again.

    `turn_over` of reference.py. Places that lack a slot get the slots used longest ago of the `window` that begin at
    `hand`, free ones first, and lose what they hold; none that was read in the last step is taken. What was looked up
    must have been read before, in the order of the queue.

    What bounds it: the launches of torch's sort of `window` stamps.

    directory   in and out
    step        the one that begins: 1 or more, one more than the last time
    hand        the first slot of the window, 0 to capacity - 1; the window goes round
    window      slots that are looked at, 1 to capacity

    Raises KernelError for a number out of its range.
    """
    _check_step(step)
    capacity, room = directory.capacity, directory.room
    if not 0 <= hand < capacity:
        raise KernelError(f"hand={hand}: must be 0 to {capacity - 1}, the last slot")
    if not 1 <= window <= capacity:
        raise KernelError(f"window={window}: must be 1 to {capacity}, the slots")
    tiles = triton.cdiv(room, _TILE)
    _publish_kernel[(tiles,)](
        directory.slots,
        directory.pages,
        directory.used,
        directory.reserve,
        directory.arrivals,
        directory.cursor,
        room,
        step,
        tile=_TILE,
    )
    seen = torch.arange(hand, hand + window, device=directory.used.device) % capacity
    stamps, oldest = directory.used[seen].sort(stable=True)
    _refill_kernel[(tiles,)](
        directory.slots,
        directory.pages,
        directory.used,
        directory.reserve,
        directory.cursor,
        directory.clock,
        stamps,
        oldest,
        (directory.reserve < 0).cumsum(0),
        room,
        step,
        hand,
        window,
        capacity,
        tile=_TILE,
    )


def forget(directory: PageDirectory, pages: Tensor, *, store_pages: int, heads: int) -> None:
    """Have pages whose content is about to change lie in no slot, in all layers and KV heads; their slots are free.

    It must come before the first look of a step, when nothing is arriving: what arrives is found later on.

    directory     in and out
    pages         [pages]   int64, of the host store, trusted; one may be named twice
    store_pages   pages of the host store of one layer and KV head
    heads         layers * kv_heads

    Raises KernelError for a tensor of another shape, dtype, device or stride, and where the directory has not as many.
    """
    check_tensor("pages", pages, torch.int64, (None,), directory.slots.device)
    if heads * store_pages != directory.entries:
        raise KernelError(f"heads={heads}: times store_pages={store_pages} must be {directory.entries} entries")
    if pages.numel() == 0 or heads == 0:
        return
    _forget_kernel[(pages.shape[0], triton.cdiv(heads, _TILE))](
        directory.slots, directory.pages, directory.used, pages, store_pages, heads, tile=_TILE
    )


def set_aside(directory: PageDirectory, firsts: Tensor, length: int) -> None:
    """Have runs of slots serve something else until they are given back: they lose what they hold, and stay empty.

    What look_up listed must have been read before, in the order of the queue.

    directory   in and out
    firsts      [runs]   int32, the first slot of each run of `length`, trusted
    length      slots of a run, 0 or more

    Raises KernelError for a tensor of another shape, dtype, device or stride, and for a length out of its range.
    """
    if not _clear_runs(directory, firsts, length, SET_ASIDE):
        return
    _withdraw_kernel[(triton.cdiv(directory.room, _TILE),)](
        directory.used, directory.reserve, directory.room, tile=_TILE
    )


def give_back(directory: PageDirectory, firsts: Tensor, length: int) -> None:
    """Have runs of slots in use again that were set aside: they are free. Arguments and errors as in `set_aside`."""
    _clear_runs(directory, firsts, length, FREE)


def _clear_runs(directory: PageDirectory, firsts: Tensor, length: int, stamp: int) -> bool:
    """Empty runs of slots and give them a stamp; False where there is none."""
    check_tensor("firsts", firsts, torch.int32, (None,), directory.slots.device)
    if not 0 <= length <= directory.capacity:
        raise KernelError(f"length={length}: must be 0 to {directory.capacity}, the slots")
    if firsts.numel() == 0 or length == 0:
        return False
    _clear_runs_kernel[(firsts.shape[0], triton.cdiv(length, _TILE))](
        directory.slots, directory.pages, directory.used, firsts, length, stamp, tile=_TILE
    )
    return True


def _check_step(step: int) -> None:
    if not 1 <= step < IN_RESERVE:
        raise KernelError(f"step={step}: must be 1 to {IN_RESERVE - 1}")


def _check_not_below(name: str, value: int, least: int) -> None:
    if value < least:
        raise KernelError(f"{name}={value}: must be at least {least}")


# Numbers that change from step to step are not specialised for: Triton would compile anew, in the middle of serving, at
# the first multiple of 16.
_CHANGING = ["blocks_row_stride", "order_row_stride", "order_head_stride", "first_page", "most", "first_entry"]


@triton.jit(do_not_specialize=_CHANGING)
def _look_up_kernel(
    listed_slots,
    listed_pages,
    listed_tokens,
    slots,
    used,
    reserve,
    arrivals,
    cursor,
    clock,
    blocks,
    seq_lens,
    candidates,
    counts,
    order,
    blocks_row_stride,
    order_row_stride,
    order_head_stride,
    first_page,
    most,
    pages_per_block,
    store_pages,
    first_entry,
    room,
    ordered: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    group = row * tl.num_programs(1) + kv_head
    first = tl.program_id(2) * tile
    count = tl.load(counts + group)
    if first >= count:
        return
    places = first + tl.arange(0, tile)
    is_page = places < count
    if ordered:
        listing = order + row * order_row_stride + kv_head * order_head_stride
        page = first_page + tl.load(listing + places, mask=is_page, other=0)
    else:
        page = tl.where(places < first_page, places, places + tl.load(candidates + row)).to(tl.int64)
    block = tl.load(blocks + row * blocks_row_stride + page // pages_per_block, mask=is_page, other=0).to(tl.int64)
    store_page = block * pages_per_block + page % pages_per_block
    entry = first_entry + kv_head * store_pages + store_page
    tokens = tl.minimum(tl.load(seq_lens + row) - page * _PAGE_TOKENS, _PAGE_TOKENS)

    slot = tl.load(slots + entry, mask=is_page, other=_ARRIVING)
    is_found = slot >= 0
    tl.store(used + slot, tl.full((tile,), 0, tl.int32) + tl.load(clock), mask=is_found)
    # Order between atomics on different words does not matter, so they are relaxed: whoever reads NOWHERE in an
    # entry, first or after another set it back, claims it alone, and every place of the reserve is drawn once.
    lacks = (slot == _NOWHERE) & (tokens == _PAGE_TOKENS)
    arriving = tl.full((tile,), _ARRIVING, tl.int32)
    before = tl.atomic_min(slots + entry, arriving, mask=lacks, sem="relaxed")
    is_claimed = lacks & (before == _NOWHERE)
    claimed = is_claimed.to(tl.int32)
    asked = tl.sum(claimed, axis=0)
    if asked > 0:
        place = tl.atomic_add(cursor, asked, sem="relaxed") + tl.cumsum(claimed, axis=0) - 1
        has_place = is_claimed & (place < room)
        tl.store(arrivals + place, entry, mask=has_place)
        given = tl.load(reserve + place, mask=has_place, other=_NOTHING)
        slot = tl.where(given >= 0, -2 - given, slot)
        nowhere = tl.full((tile,), _NOWHERE, tl.int32)
        tl.atomic_xchg(slots + entry, nowhere, mask=is_claimed & (place >= room), sem="relaxed")
        is_found |= given >= 0

    listed = group * most + places
    tl.store(listed_slots + listed, tl.where(is_found, slot, -1), mask=is_page)
    tl.store(listed_pages + listed, store_page.to(tl.int32), mask=is_page)
    tl.store(listed_tokens + listed, tokens.to(tl.int32), mask=is_page)


@triton.jit(do_not_specialize=["step"])
def _publish_kernel(slots, pages, used, reserve, arrivals, cursor, room, step, tile: tl.constexpr):
    places = tl.program_id(0) * tile + tl.arange(0, tile)
    is_arrival = places < tl.minimum(tl.load(cursor), room)
    entry = tl.load(arrivals + places, mask=is_arrival, other=0)
    slot = tl.load(reserve + places, mask=is_arrival, other=_NOTHING)
    has_slot = slot >= 0
    tl.store(slots + entry, tl.where(has_slot, slot, _NOWHERE), mask=is_arrival)
    tl.store(pages + slot, entry, mask=has_slot)
    tl.store(used + slot, tl.full((tile,), -1, tl.int32) + step, mask=has_slot)
    tl.store(reserve + places, tl.full((tile,), _NOTHING, tl.int32), mask=is_arrival)


@triton.jit(do_not_specialize=["step", "hand"])
def _refill_kernel(
    slots,
    pages,
    used,
    reserve,
    cursor,
    clock,
    stamps,
    oldest,
    lacking,
    room,
    step,
    hand,
    window,
    capacity,
    tile: tl.constexpr,
):
    places = tl.program_id(0) * tile + tl.arange(0, tile)
    is_place = places < room
    # The n-th place without a slot gets the n-th of the slots in the order of their stamps.
    rank = tl.load(lacking + places, mask=is_place, other=0) - 1
    is_empty = is_place & (tl.load(reserve + places, mask=is_place, other=0) < 0) & (rank < window)
    stamp = tl.load(stamps + rank, mask=is_empty, other=_SET_ASIDE)
    is_taken = is_empty & (stamp < step - 1)
    slot = (hand + tl.load(oldest + rank, mask=is_taken, other=0)) % capacity
    entry = tl.load(pages + slot, mask=is_taken, other=_NOTHING)
    tl.store(slots + entry, tl.full((tile,), _NOWHERE, tl.int32), mask=entry >= 0)
    tl.store(pages + slot, tl.full((tile,), _NOTHING, tl.int64), mask=is_taken)
    tl.store(used + slot, tl.full((tile,), _IN_RESERVE, tl.int32), mask=is_taken)
    tl.store(reserve + places, slot.to(tl.int32), mask=is_taken)
    if tl.program_id(0) == 0:
        tl.store(cursor, 0)
        tl.store(clock, step)


@triton.jit
def _forget_kernel(slots, held, used, pages, store_pages, heads, tile: tl.constexpr):
    head = tl.program_id(1) * tile + tl.arange(0, tile)
    entry = head.to(tl.int64) * store_pages + tl.load(pages + tl.program_id(0))
    slot = tl.load(slots + entry, mask=head < heads, other=_NOWHERE)
    is_found = slot >= 0
    tl.store(held + slot, tl.full((tile,), _NOTHING, tl.int64), mask=is_found)
    tl.store(used + slot, tl.full((tile,), -1, tl.int32), mask=is_found)
    tl.store(slots + entry, tl.full((tile,), _NOWHERE, tl.int32), mask=is_found)


@triton.jit
def _clear_runs_kernel(slots, pages, used, firsts, length, stamp, tile: tl.constexpr):
    place = tl.program_id(1) * tile + tl.arange(0, tile)
    is_slot = place < length
    slot = tl.load(firsts + tl.program_id(0)).to(tl.int64) + place
    entry = tl.load(pages + slot, mask=is_slot, other=_NOTHING)
    tl.store(slots + entry, tl.full((tile,), _NOWHERE, tl.int32), mask=entry >= 0)
    tl.store(pages + slot, tl.full((tile,), _NOTHING, tl.int64), mask=is_slot)
    tl.store(used + slot, tl.full((tile,), 0, tl.int32) + stamp, mask=is_slot)


@triton.jit
def _withdraw_kernel(used, reserve, room, tile: tl.constexpr):
    places = tl.program_id(0) * tile + tl.arange(0, tile)
    slot = tl.load(reserve + places, mask=places < room, other=_NOTHING)
    stamp = tl.load(used + slot, mask=slot >= 0, other=0)
    tl.store(reserve + places, tl.full((tile,), _NOTHING, tl.int32), mask=stamp == _SET_ASIDE)
