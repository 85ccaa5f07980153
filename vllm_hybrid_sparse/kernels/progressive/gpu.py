"""Progressive attention of a layer's decode rows on the device, by microbatches (PSA, sections 3.2 and 3.3)."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import check_tensor
from vllm_hybrid_sparse.kernels.sparse_attention.gpu import attend_slots
from vllm_hybrid_sparse.kernels.verify.gpu import verify
from vllm_hybrid_sparse.kernels.verify.progress import Progress
from vllm_hybrid_sparse.values import PAGE_TOKENS


class PageLoader(Protocol):
    """Brings the pages of microbatches into their slots. Called in order; no call waits for the device."""

    def start(self, microbatch: int) -> None:
        """Begin to load a microbatch, beside what the current stream computes."""

    def wait(self, microbatch: int) -> None:
        """Let what the current stream is given next begin only after the microbatch is in its slots."""


class DeviceProgress(NamedTuple):
    """What was done to the rows, beside their states, which are changed in place."""

    progress: Progress  # done, P_acc and what is left to read of each row and KV head
    microbatches: int  # that were launched; those after the stop flag was set found every row done


def progressive_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    candidates: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    threshold: float,
    microbatch_pages: int,
    loader: PageLoader | None = None,
    log_left: Tensor | None = None,
    stop: Tensor | None = None,
) -> DeviceProgress:
    """Fold ranked pages into the states of decode rows until P_acc exceeds the threshold for every one (Algorithm 1).

    Nothing here waits for the device. Between two microbatches the host looks at the stop flag, which the verifying
    kernel has or has not set by then; microbatches launched too many see that every row is done, and return. Microbatch
    i + 1 is being loaded while i is attended to.

    The retained set is attended to before, and lies in `out` and `lse`. A row with no candidates reads nothing. Without
    `log_left` every other row reads one microbatch at least.

    query            [rows, q_heads, head_dim]       of the KV dtype
    k_pool, v_pool   [slots, 16, head_dim]           bf16 | f16 | f32
    slots            [rows, kv_heads, pages]         int32, where each row's pages are or will be when their microbatch
                                                     is loaded, best first; negative behind the last that may be read
    candidates       [rows, kv_heads]                int32, candidate pages of each group, read or not
    out, lse         [rows, q_heads, head_dim], [rows, q_heads]   f32, the states, in and out
    loader           None: all pages lie in their slots
    log_left         [microbatches + 1, rows, q_heads]   f32, what the pages behind the first i microbatches are
                                                     estimated to weigh together, log; None: PSA's lightest page
    stop             as in `Progress.begin`
    """
    check_tensor("slots", slots, torch.int32, (None, None, None), k_pool.device)
    if microbatch_pages < 1:
        raise KernelError(f"microbatch_pages={microbatch_pages}: must be 1 or more")
    rows, kv_heads, pages = slots.shape
    check_tensor("candidates", candidates, torch.int32, (rows, kv_heads), k_pool.device)
    check_tensor("lse", lse, torch.float32, (rows, None), k_pool.device)
    q_heads = lse.shape[1]
    microbatches = -(-pages // microbatch_pages)
    if log_left is not None:
        check_tensor("log_left", log_left, torch.float32, (microbatches + 1, rows, q_heads), k_pool.device)

    budget = (slots >= 0).sum(dim=2, dtype=torch.int32)
    progress = Progress.begin(candidates, budget, q_heads, stop)
    page_tokens = torch.full((rows, kv_heads, microbatch_pages), PAGE_TOKENS, dtype=torch.int32, device=k_pool.device)

    def look(page_lse: Tensor, index: int) -> None:
        verify(lse, page_lse, progress, threshold=threshold, log_left=None if log_left is None else log_left[index])

    if loader is not None and microbatches:
        loader.start(0)
    look(torch.empty(rows, q_heads, 0, device=k_pool.device), 0)
    launched = 0
    while launched < microbatches and not int(progress.stop[0]):
        if loader is not None:
            if launched + 1 < microbatches:
                loader.start(launched + 1)
            loader.wait(launched)
        part = slots[:, :, launched * microbatch_pages : (launched + 1) * microbatch_pages]
        # Rows that are done leave their page weights unwritten, and the verifying kernel does not read them.
        page_lse = torch.empty(rows, q_heads, part.shape[2], device=k_pool.device)
        tokens = page_tokens[:, :, : part.shape[2]]
        attend_slots(query, k_pool, v_pool, part, tokens, progress.done, out, lse, page_lse, scale=scale)
        launched += 1
        look(page_lse, launched)
    return DeviceProgress(progress, launched)
