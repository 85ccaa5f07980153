"""Planning a reading by estimates, and reading on until it is enough, on the device and with no word to the host."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import (
    SCORE_WARPS,
    block_group,
    check_host,
    check_pools,
    check_tensor,
    group_size,
    score_tile,
    unread_tile,
)
from vllm_hybrid_sparse.kernels.copy.reference import packed_together
from vllm_hybrid_sparse.kernels.listed_attention.gpu import fold_pages, listed_tile, read_pages
from vllm_hybrid_sparse.kernels.listed_attention.state import HostStore, Tally
from vllm_hybrid_sparse.kernels.reading.plan import PageTables, RankedPages, ReadingPlan, check_rule
from vllm_hybrid_sparse.values import PAGE_TOKENS

_STEP_WITHOUT_THRESHOLD = 256
"""Pages that are taken at a time where nothing is looked at in between. Of groups above 16 heads half a tile is less,
and is taken: more would spill (sm_90)."""

_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)


def plan_reading(pages: RankedPages, retained_lse: Tensor, *, threshold: float, microbatch_pages: int) -> ReadingPlan:
    """Say how many pages each group reads at first: `plan_reading` of reference.py.

    Whole microbatches of the order until P_acc would exceed the threshold if every page weighed what it is estimated
    to, none where the retained set is enough, no more than the budget. At a threshold of 1 it is the budget.

    What bounds it: latency, of a loop over microbatches. One program plans for a group.

    retained_lse       [rows, q_heads]   f32, log-sum-exp of the retained set
    threshold          ε, in (0, 1]
    microbatch_pages   1 or more
    """
    check_rule(threshold, microbatch_pages)
    device = pages.scores.device
    rows, q_heads, most, kv_heads = _check_pages(pages)
    check_tensor("retained_lse", retained_lse, torch.float32, (rows, q_heads), device)
    group = group_size(q_heads, kv_heads)
    plan = ReadingPlan(
        counts=torch.empty(rows, kv_heads, dtype=torch.int32, device=device),
        log_unread=torch.empty(rows, q_heads, dtype=torch.float32, device=device),
        kept=torch.empty(rows, kv_heads, dtype=torch.float32, device=device),
    )
    if rows:
        heads = block_group(group, least=1)
        tile = score_tile(heads)
        step = microbatch_pages if threshold < 1 else min(_STEP_WITHOUT_THRESHOLD, tile // 2)
        lists_all = pages.order.shape[2] == most
        marks = torch.empty(0 if lists_all else rows * kv_heads * most, dtype=torch.uint8, device=device)
        _plan_kernel[(rows, kv_heads)](
            pages.scores,
            pages.order,
            pages.candidates,
            pages.budgets,
            retained_lse,
            plan.counts,
            plan.log_unread,
            plan.kept,
            marks,
            most,
            pages.order.shape[2],
            step,
            threshold,
            group=group,
            block_group=heads,
            block_step=triton.next_power_of_2(step),
            tile=tile,
            num_warps=SCORE_WARPS,
        )
    return plan


def read_on(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    host: HostStore,
    pages: RankedPages,
    tables: PageTables,
    retained_lse: Tensor,
    read: tuple[Tensor, Tensor],
    plan: ReadingPlan,
    tally: Tally,
    *,
    scale: float,
    threshold: float,
    microbatch_pages: int,
) -> None:
    """Look at what was read, and read on by microbatches until it is enough: `read_on` of reference.py, in place.

    P_acc is what the retained set and the pages read weigh, which is exact, over itself plus the estimates of all
    unread pages; a group goes on until it exceeds the threshold for every head (PSA, Algorithm 1, lines 9 to 18, with
    the remainder that key codes estimate), or the budget is read. What is read here stays where it lies.

    What bounds it: most groups have enough and only look, so its launch; one that has not reads its pages one after
    another, latency.

    query          [rows, q_heads, head_dim]     of the KV dtype, rows may be strided
    k_pool, v_pool, host                         as `attend_listed` takes them
    pages          their order lists all candidates
    retained_lse   [rows, q_heads]               f32
    read           (out, lse): [rows, q_heads, head_dim] and [rows, q_heads] f32, in and out: of the candidates read
    plan           in and out: what was read, and what it leaves
    tally          what was read and groups that were looked at are added to it
    """
    check_rule(threshold, microbatch_pages)
    head_dim = check_pools(k_pool, v_pool)
    device = k_pool.device
    check_tensor("query", query, k_pool.dtype, (None, None, head_dim), device, strided_dims=1)
    check_host(host.elements, k_pool.dtype, device)
    rows, q_heads, most, kv_heads = _check_pages(pages)
    if pages.order.shape[2] < most:
        raise KernelError(f"order={pages.order.shape[2]} pages: reading on needs all {most} of scores")
    group = group_size(q_heads, kv_heads)
    check_tensor("blocks", tables.blocks, torch.int32, (rows, None), device, strided_dims=1)
    check_tensor("slots", tables.slots, torch.int32, (None,), device)
    check_tensor("retained_lse", retained_lse, torch.float32, (rows, q_heads), device)
    out, lse = read
    check_tensor("out", out, torch.float32, (rows, q_heads, head_dim), device)
    check_tensor("lse", lse, torch.float32, (rows, q_heads), device)
    check_tensor("counts", plan.counts, torch.int32, (rows, kv_heads), device)
    check_tensor("log_unread", plan.log_unread, torch.float32, (rows, q_heads), device)
    check_tensor("kept", plan.kept, torch.float32, (rows, kv_heads), device)
    check_tensor("tally numbers", tally.numbers, torch.int64, (len(Tally.NUMBERS),), device)
    check_tensor("tally kept", tally.kept, torch.float64, (1,), device)
    if rows == 0:
        return
    heads = block_group(group)
    _read_on_kernel[(rows, kv_heads)](
        query,
        k_pool,
        v_pool,
        host.elements,
        pages.scores,
        pages.order,
        pages.candidates,
        pages.budgets,
        tables.blocks,
        tables.slots,
        retained_lse,
        out,
        lse,
        plan.counts,
        plan.log_unread,
        plan.kept,
        tally.numbers,
        tally.kept,
        query.stride(0),
        tables.blocks.stride(0),
        host.block_stride,
        host.head_stride,
        host.page_stride,
        host.pages_per_block,
        tables.first_page,
        tables.first_entry,
        tables.store_pages,
        most,
        pages.order.shape[2],
        microbatch_pages,
        scale,
        threshold,
        group=group,
        head_dim=head_dim,
        pack=packed_together(k_pool.dtype),
        block_group=heads,
        block_dim=triton.next_power_of_2(head_dim),
        tile=listed_tile(heads, head_dim, k_pool.dtype),
        sum_tile=unread_tile(heads, head_dim),
    )


def _check_pages(pages: RankedPages) -> tuple[int, int, int, int]:
    """Rows, query heads, pages and KV heads."""
    device = pages.scores.device
    check_tensor("scores", pages.scores, torch.float32, (None, None, None), device)
    rows, q_heads, most = pages.scores.shape
    check_tensor("order", pages.order, torch.int64, (rows, None, None), device)
    if pages.order.shape[2] > most:
        raise KernelError(f"order={pages.order.shape[2]} pages: must be at most the {most} of scores")
    check_tensor("candidates", pages.candidates, torch.int32, (rows,), device)
    check_tensor("budgets", pages.budgets, torch.int32, (rows,), device)
    return rows, q_heads, most, pages.order.shape[1]


@triton.jit
def _least_share(log_rest, log_read, is_head):
    """The least P_acc of a group's heads, of what weighs `log_rest` beside what is read."""
    share = tl.where(log_rest == float("-inf"), 1.0, 1.0 / (1.0 + tl.exp(log_rest - log_read)))
    return tl.min(tl.where(is_head, share, 1.0), axis=0)


@triton.jit
def _log_add(a, b):
    """log(exp(a) + exp(b)), of which one is above -inf."""
    high = tl.maximum(a, b)
    return high + tl.log(tl.exp(a - high) + tl.exp(b - high))


@triton.jit
def _taken(scores, states, is_head, pages, is_page, base, most):
    """What pages are estimated to weigh together for each head, in units of exp(base)."""
    weights = tl.load(
        scores + states[:, None] * most + pages[None, :], mask=is_head[:, None] & is_page[None, :], other=float("-inf")
    )
    return tl.sum(tl.exp(weights - base[:, None]), axis=1)


@triton.jit
def _little_left(unread, is_head):
    """Whether some head has too little left to tell by subtracting: of logarithms below 64, 5e-4 of it is rounding."""
    return tl.min(tl.where(is_head, unread, 1.0), axis=0) < 1 / 128


@triton.jit
def _sum_listed(scores, order, states, is_head, begin, end, most, tile: tl.constexpr):
    """What the pages from `begin` to `end` of an order are estimated to weigh: a peak, and the sum of exp above it."""
    peak = tl.where(is_head, float("-inf"), 0.0)
    total = tl.zeros_like(peak)
    for start in range(begin, end, tile):
        some = start + tl.arange(0, tile)
        page = tl.load(order + some, mask=some < end, other=0)
        peak, total = _add_weights(scores, states, is_head, page, some < end, most, peak, total)
    return peak, total


@triton.jit
def _add_unlisted(scores, order, marks, states, is_head, listed, num, most, peak, total, tile: tl.constexpr):
    """Add the candidates that are not among the `listed` pages of an order; `marks` [num] is overwritten."""
    for start in range(0, num, tile):
        page = start + tl.arange(0, tile)
        tl.store(marks + page, 0, mask=page < num)
    tl.debug_barrier()  # what one thread stores here another one loads below
    for start in range(0, listed, tile):
        some = start + tl.arange(0, tile)
        page = tl.load(order + some, mask=some < listed, other=0)
        tl.store(marks + page, 1, mask=some < listed)
    tl.debug_barrier()
    for start in range(0, num, tile):
        page = start + tl.arange(0, tile)
        unlisted = tl.load(marks + page, mask=page < num, other=1) == 0
        peak, total = _add_weights(scores, states, is_head, page, unlisted, most, peak, total)
    return peak, total


@triton.jit
def _add_weights(scores, states, is_head, page, is_page, most, peak, total):
    """Add pages to sums of exp(score - peak)."""
    weights = tl.load(
        scores + states[:, None] * most + page[None, :], mask=is_head[:, None] & is_page[None, :], other=float("-inf")
    )
    new_peak = tl.maximum(peak, tl.max(weights, axis=1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return new_peak, total * tl.exp(peak - base) + tl.sum(tl.exp(weights - base[:, None]), axis=1)


@triton.jit
def _log_sum(peak, total):
    """The logarithm of such a sum; -inf if it has no weight."""
    return tl.where(total > 0.0, peak + tl.log(tl.where(total > 0.0, total, 1.0)), float("-inf"))


@triton.jit
def _left_behind(scores, order, states, is_head, unread, base, count, num, most, tile: tl.constexpr):
    """The logarithm of what is left of an order that lists all; its unit, and what is left in it, which may be new."""
    log_rest = base + tl.log(tl.maximum(unread, 0.0))
    if _little_left(unread, is_head):
        log_rest = _log_sum(*_sum_listed(scores, order, states, is_head, count, num, most, tile))
        base = tl.where(log_rest == float("-inf"), 0.0, log_rest)
        unread = tl.exp(log_rest - base)
    return log_rest, base, unread


@triton.jit
def _store_page(blocks, page, is_page, pages_per_block):
    """Where pages of a request lie in the host store."""
    block = tl.load(blocks + page // pages_per_block, mask=is_page, other=0).to(tl.int64)
    return block * pages_per_block + page % pages_per_block


@triton.jit
def _resume(outputs, lse, is_output):
    """Total and sum of values of a running softmax whose peak is the log-sum-exp of what was read."""
    seen = lse > float("-inf")
    return tl.where(seen, 1.0, 0.0), tl.load(outputs, mask=is_output & seen[:, None], other=0.0)


@triton.jit
def _count(numbers, kept_sum, further, hits, stops, looks, share):
    """Add a group that was looked at to a `Tally`."""
    tl.atomic_add(numbers, further.to(tl.int64), sem="relaxed")
    tl.atomic_add(numbers + 1, hits.to(tl.int64), sem="relaxed")
    tl.atomic_add(numbers + 3, 1, sem="relaxed")
    tl.atomic_add(numbers + 4, stops.to(tl.int64), sem="relaxed")
    tl.atomic_add(numbers + 5, looks, sem="relaxed")
    tl.atomic_add(kept_sum, share.to(tl.float64), sem="relaxed")


# Numbers that grow with contexts are not to be compiled for anew, nor where `budgets` begin, which lie behind others.
@triton.jit(do_not_specialize=["most", "listed", "step"], do_not_specialize_on_alignment=["candidates", "budgets"])
def _plan_kernel(
    scores,
    order,
    candidates,
    budgets,
    retained_lse,
    counts,
    log_unread,
    kept,
    marks,
    most,
    listed,
    step,
    threshold,
    group: tl.constexpr,
    block_group: tl.constexpr,
    block_step: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    unit = row * tl.num_programs(1) + tl.program_id(1)
    heads = tl.arange(0, block_group)
    is_head = heads < group
    states = unit * group + heads
    num = tl.load(candidates + row)
    budget = tl.load(budgets + row)

    peak = tl.full((block_group,), float("-inf"), tl.float32)
    total = tl.zeros((block_group,), tl.float32)
    for start in range(0, num, tile):
        page = start + tl.arange(0, tile)
        peak, total = _add_weights(scores, states, is_head, page, page < num, most, peak, total)
    has_weight = total > 0.0
    base = tl.where(has_weight, _log_sum(peak, total), 0.0)

    # In shares of what the candidates weigh together that were unread when they were last summed; first all are.
    log_retained = tl.load(retained_lse + states, mask=is_head, other=0.0)
    unread = tl.where(has_weight, 1.0, 0.0)
    expected = tl.exp(tl.minimum(log_retained - base, 80.0))
    count = 0
    share = _least_share(tl.log(unread), tl.log(expected), is_head)
    while (count < budget) & (share <= threshold):
        some = count + tl.arange(0, block_step)
        is_page = (tl.arange(0, block_step) < step) & (some < budget)
        page = tl.load(order + unit * listed + some, mask=is_page, other=0)
        taken = _taken(scores, states, is_head, page, is_page, base, most)
        unread -= taken
        expected += taken
        count = tl.minimum(count + step, budget)
        if _little_left(unread, is_head):
            ordered = tl.minimum(listed, num)
            of_unit = order + unit * listed
            peak, total = _sum_listed(scores, of_unit, states, is_head, count, ordered, most, tile // 4)
            if ordered < num:
                of_marks = marks + unit * most
                peak, total = _add_unlisted(
                    scores, of_unit, of_marks, states, is_head, ordered, num, most, peak, total, tile // 4
                )
            log_rest = _log_sum(peak, total)
            has_weight = total > 0.0
            expected *= tl.exp(tl.minimum(tl.where(has_weight, base - log_rest, 0.0), 80.0))
            base = tl.where(has_weight, log_rest, base)
            unread = tl.where(has_weight, 1.0, 0.0)
        share = _least_share(tl.log(unread), tl.log(expected), is_head)

    tl.store(counts + unit, count)
    tl.store(log_unread + states, base + tl.log(unread), mask=is_head)
    tl.store(kept + unit, share)


@triton.jit(
    do_not_specialize=["blocks_row_stride", "first_page", "first_entry", "most", "listed", "microbatch"],
    do_not_specialize_on_alignment=["candidates", "budgets"],
)
def _read_on_kernel(
    query,
    k_pool,
    v_pool,
    host,
    scores,
    order,
    candidates,
    budgets,
    blocks,
    slots,
    retained_lse,
    out,
    lse,
    counts,
    log_unread,
    kept,
    numbers,
    kept_sum,
    query_row_stride,
    blocks_row_stride,
    block_stride,
    head_stride,
    page_stride,
    pages_per_block,
    first_page,
    first_entry,
    store_pages,
    most,
    listed,
    microbatch,
    scale,
    threshold,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    pack: tl.constexpr,
    block_group: tl.constexpr,
    block_dim: tl.constexpr,
    tile: tl.constexpr,
    sum_tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    unit = row * tl.num_programs(1) + kv_head
    heads = tl.arange(0, block_group)
    is_head = heads < group
    states = unit * group + heads
    num = tl.load(candidates + row)
    if num == 0:
        return
    budget = tl.load(budgets + row)
    planned = tl.load(counts + unit)
    count = planned
    log_retained = tl.load(retained_lse + states, mask=is_head, other=0.0)
    peak = tl.load(lse + states, mask=is_head, other=float("-inf"))
    log_rest = tl.load(log_unread + states, mask=is_head, other=float("-inf"))

    # What the candidates read weigh beside the retained set, then P_acc.
    share = _least_share(log_rest, _log_add(log_retained, peak), is_head)
    looks = (planned > 0).to(tl.int64)
    hits = tl.full((), 0, tl.int32)
    if (count < budget) & (share <= threshold):
        dims = tl.arange(0, block_dim)
        is_output = is_head[:, None] & (dims < head_dim)[None, :]
        in_row = (kv_head * group + heads)[:, None] * head_dim + dims[None, :]
        q = tl.load(query + row * query_row_stride + in_row, mask=is_output, other=0.0)
        outputs = out + states[:, None] * head_dim + dims[None, :]
        total, acc = _resume(outputs, peak, is_output)
        base = tl.where(log_rest == float("-inf"), 0.0, log_rest)
        unread = tl.exp(log_rest - base)  # a share of what it was when it was last summed
        while (count < budget) & (share <= threshold):
            end = tl.minimum(count + microbatch, budget)
            for start in range(count, end, tile):
                some = start + tl.arange(0, tile)
                is_page = some < end
                candidate = tl.load(order + unit * listed + some, mask=is_page, other=0)
                unread -= _taken(scores, states, is_head, candidate, is_page, base, most)
                page = _store_page(blocks + row * blocks_row_stride, first_page + candidate, is_page, pages_per_block)
                entry = first_entry + kv_head.to(tl.int64) * store_pages + page
                slot = tl.maximum(tl.load(slots + entry, mask=is_page, other=-1), -1)
                hits += tl.sum((slot >= 0).to(tl.int32), axis=0)
                limit = is_page.to(tl.int32) * _PAGE_TOKENS
                k, v = read_pages(
                    k_pool,
                    v_pool,
                    host,
                    slot,
                    page,
                    limit,
                    kv_head,
                    block_stride,
                    head_stride,
                    page_stride,
                    pages_per_block,
                    head_dim,
                    pack,
                    block_dim,
                    tile,
                )
                peak, total, acc = fold_pages(q, k, v, limit, peak, total, acc, scale, tile)
            count = end
            log_rest, base, unread = _left_behind(
                scores, order + unit * listed, states, is_head, unread, base, count, num, most, sum_tile
            )
            share = _least_share(log_rest, _log_add(log_retained, peak + tl.log(total)), is_head)
            looks += 1
        tl.store(outputs, acc / total[:, None], mask=is_output)
        tl.store(lse + states, peak + tl.log(total), mask=is_head)
        tl.store(log_unread + states, log_rest, mask=is_head)
        tl.store(counts + unit, count)
    tl.store(kept + unit, share)
    _count(numbers, kept_sum, count - planned, hits, count < num, looks, share)
