"""Prompts on a GPU: exact attention of a chunk to itself and, streamed from the host store, to all before it."""

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.copy.gpu import load_pages
from vllm_hybrid_sparse.kernels.dense_attention.library import attend_dense
from vllm_hybrid_sparse.kernels.merge.choice import choose_merge
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.queues import DeviceQueue, Mark, current_queue, upload
from vllm_hybrid_sparse.runtime.device_batch import PromptChunk
from vllm_hybrid_sparse.values import PAGE_TOKENS

STAGED_PAGES = 128
"""Pages of each KV head that are loaded while as many are attended: 2048 tokens. Not tuned on a GPU yet."""


class StreamedPrefill:
    """Attention of prompt chunks. Two halves of a staging area take turns: one is filled while the other is read.

    Nothing waits for the device: the loading queue and the caller's queue follow each other's marks.
    """

    def __init__(self, queue: DeviceQueue, kv_heads: int, head_dim: int, dtype: torch.dtype, scale: float) -> None:
        """An empty staging area.

        queue   for the loads, and for the stores of chunks, so that a chunk finds what an earlier one has stored
        """
        self._queue, self._kv_heads, self._scale = queue, kv_heads, scale
        size = (2, kv_heads * STAGED_PAGES, PAGE_TOKENS, head_dim)
        self._key, self._value = (torch.empty(size, dtype=dtype, device=queue.device) for _ in range(2))
        self._read: list[Mark | None] = [None, None]  # behind what last read each half
        self._turn = 0

    @staticmethod
    def staging_bytes(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Device memory of the staging area."""
        return 4 * kv_heads * STAGED_PAGES * PAGE_TOKENS * head_dim * dtype.itemsize

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, source: HostPages, chunk: PromptChunk, output: Tensor
    ) -> None:
        """Compute the attention of one chunk's rows, and write it to `output`.

        query, output   [tokens, q_heads, head_dim]    of the batch, on the device; output may be of another float dtype
        key, value      [tokens, kv_heads, head_dim]   of the batch
        """
        rows = slice(chunk.first_token, chunk.first_token + chunk.tokens)
        by_head = query[rows].transpose(0, 1).contiguous()  # once: a group's heads are rows of one head further down
        out, lse = attend_dense(
            by_head, key[rows].transpose(0, 1), value[rows].transpose(0, 1), scale=self._scale, causal=True
        )
        _, merge_states = choose_merge(query.device.type, torch.float32)
        for first_token in range(0, chunk.context_tokens, STAGED_PAGES * PAGE_TOKENS):
            tokens = min(STAGED_PAGES * PAGE_TOKENS, chunk.context_tokens - first_token)
            staged_key, staged_value, half = self._stage(source, chunk, first_token, tokens)
            part = attend_dense(by_head, staged_key, staged_value, scale=self._scale, causal=False)
            self._read[half] = current_queue(query.device).mark()
            out, lse = merge_states(out.contiguous(), lse.contiguous(), part[0].contiguous(), part[1].contiguous())
        output[rows] = out.transpose(0, 1).to(output.dtype)

    def _stage(
        self, source: HostPages, chunk: PromptChunk, first_token: int, tokens: int
    ) -> tuple[Tensor, Tensor, int]:
        """Start to load part of the context, and make the caller's queue wait for it.

        returns   key, value [kv_heads, tokens, head_dim], and the half that they lie in
        """
        half, self._turn = self._turn, 1 - self._turn
        first_page, count = first_token // PAGE_TOKENS, -(-tokens // PAGE_TOKENS)
        pages = chunk.store_pages(first_page, first_page + count)
        heads = torch.arange(self._kv_heads)[:, None]
        offsets = source.offsets(heads, pages[None]).flatten()
        slots = (heads * STAGED_PAGES + torch.arange(count)).flatten().to(torch.int32)
        read = self._read[half]
        if read is not None:
            self._queue.follow(read)
        with self._queue.launching():
            load_pages(
                source.elements,
                upload(offsets, self._queue.device),
                upload(slots, self._queue.device),
                self._key[half],
                self._value[half],
            )
        current_queue(self._queue.device).follow(self._queue.mark())
        key, value = (
            part[half].view(self._kv_heads, -1, part.shape[-1])[:, :tokens] for part in (self._key, self._value)
        )
        return key, value, half
