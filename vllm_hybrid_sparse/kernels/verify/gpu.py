"""The verifying kernel: sets `done` on the device and the stop flag in host memory, with no word to the host."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import block_group, check_tensor, group_size
from vllm_hybrid_sparse.kernels.verify.progress import Progress

_TILE_PAGES = 64
"""Pages that a program looks at at a time, whatever a round has. Not tuned on a GPU."""


def verify(
    lse: Tensor, page_lse: Tensor, progress: Progress, *, threshold: float, log_left: Tensor | None = None
) -> None:
    """Look at what has been read after a round, PSA's microbatch (PSA, Algorithm 1, lines 13 to 17, and section 3.3).

    `verify` of reference.py in float32, in place. Groups that are done already are left as they are. The group that is
    the last to be done sets the stop flag, which the host may read at any time and which never changes back.

    Call it once with no pages before the first microbatch: groups without candidates are then done from the start, and
    with `log_left` so are those whose retained set is enough.

    What bounds it: its launch; it reads a few bytes a page and head.

    lse         [rows, q_heads]           f32, of everything attended to
    page_lse    [rows, q_heads, pages]    f32, of the microbatch's pages, -inf: not read
    progress    what is kept between microbatches, in and out
    threshold   ε, in (0, 1]; at 1 only the budget ends the reading
    log_left    [rows, q_heads]           f32, estimated weight of what is unread after this microbatch; None: each
                                          page as much as the lightest page read
    """
    if not 0 < threshold <= 1:
        raise KernelError(f"threshold={threshold}: must be in (0, 1]")
    device = progress.done.device
    rows, kv_heads = progress.done.shape
    check_tensor("lse", lse, torch.float32, (rows, progress.lightest.shape[1]), device)
    q_heads = lse.shape[1]
    check_tensor("page_lse", page_lse, torch.float32, (rows, q_heads, None), device)
    if log_left is not None:
        check_tensor("log_left", log_left, torch.float32, (rows, q_heads), device)
    group = group_size(q_heads, kv_heads)
    if rows == 0:
        return
    pages = page_lse.shape[2]
    _verify_kernel[(rows, kv_heads)](
        lse,
        page_lse if pages else lse,
        lse if log_left is None else log_left,
        progress.lightest,
        progress.pages_left,
        progress.budget_left,
        progress.done,
        progress.mass,
        progress.active,
        progress.stop,
        pages,
        threshold,
        group=group,
        block_group=block_group(group, least=1),
        tile_pages=_TILE_PAGES,
        estimated=log_left is not None,
    )


@triton.jit(
    do_not_specialize=["num_pages"],  # nor on where what was uploaded together, or lies in one tensor, begins
    do_not_specialize_on_alignment=["page_lse", "log_left", "lightest", "pages_left", "budget_left", "stop"],
)
def _verify_kernel(
    lse,
    page_lse,
    log_left,
    lightest,
    pages_left,
    budget_left,
    done,
    mass,
    active,
    stop,
    num_pages,
    threshold,
    group: tl.constexpr,
    block_group: tl.constexpr,
    tile_pages: tl.constexpr,
    estimated: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    unit = row * tl.num_programs(1) + kv_head
    if tl.load(done + unit) != 0:
        return
    heads = tl.arange(0, block_group)
    is_head = heads < group
    q_heads = unit * group + heads
    read = 0
    log_min = tl.load(lightest + q_heads, mask=is_head, other=float("inf"))
    for start in range(0, num_pages, tile_pages):
        pages = start + tl.arange(0, tile_pages)
        weights = tl.load(
            page_lse + q_heads[:, None] * num_pages + pages[None, :],
            mask=is_head[:, None] & (pages < num_pages)[None, :],
            other=float("-inf"),
        )
        was_read = weights > float("-inf")
        read += tl.sum(tl.max(was_read.to(tl.int32), axis=0), axis=0)
        log_min = tl.minimum(log_min, tl.min(tl.where(was_read, weights, float("inf")), axis=1))
    unread = tl.load(pages_left + unit) - read
    may_read = tl.load(budget_left + unit) - read

    log_read = tl.load(lse + q_heads, mask=is_head, other=0.0)
    if estimated:
        log_rest = tl.load(log_left + q_heads, mask=is_head, other=float("-inf"))
    else:
        log_rest = tl.where(unread > 0, log_min + tl.log(tl.maximum(unread, 1).to(tl.float32)), float("-inf"))
    kept = tl.where(log_rest == float("-inf"), 1.0, 1.0 / (1.0 + tl.exp(log_rest - log_read)))

    tl.store(lightest + q_heads, log_min, mask=is_head)
    tl.store(pages_left + unit, unread)
    tl.store(budget_left + unit, may_read)
    tl.store(mass + q_heads, kept, mask=is_head)
    is_enough = (kept > threshold) | (heads >= group)
    if (tl.min(is_enough.to(tl.int32), axis=0) == 1) | (may_read <= 0):
        tl.store(done + unit, 1)
        if tl.atomic_add(active, -1) == 1:
            # Written through to host memory; the host may see it before this kernel ends.
            tl.store(stop, 1, cache_modifier=".wt")
