"""Layers whose tensors lie on a GPU: it computes prompts, resident and ranked rows, and its part of two-tier rows.

For two-tier rows the host scores, ranks and plans in every layer, and attends to its share. So their queries, keys and
values are copied to pinned memory. The step's thread waits for the event behind that copy and for those of the rounds,
never for the device as a whole. Everything else is only launched.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.kernels.copy.gpu import TokenFrames
from vllm_hybrid_sparse.kernels.fluxion.native import keep_queries
from vllm_hybrid_sparse.kernels.hgca.native import judging_rows, reevaluate
from vllm_hybrid_sparse.kernels.latest_rows import LatestRows
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.memory.queues import Mark, current_queue, host_empty, open_queue, upload
from vllm_hybrid_sparse.memory.write_through import Encode, Stored, WriteThrough
from vllm_hybrid_sparse.runtime.device_batch import DeviceBatch, PromptChunk
from vllm_hybrid_sparse.runtime.launch_graphs import Capture, LaunchGraphs
from vllm_hybrid_sparse.runtime.prefill import StreamedPrefill
from vllm_hybrid_sparse.runtime.prompt_rows import Arriving, PromptRows
from vllm_hybrid_sparse.runtime.ranking import ranking_bytes
from vllm_hybrid_sparse.runtime.residency import ResidentRows
from vllm_hybrid_sparse.runtime.step import TieredLayer
from vllm_hybrid_sparse.runtime.step_rows import RankedRows
from vllm_hybrid_sparse.runtime.tiers import DeviceTier
from vllm_hybrid_sparse.runtime.warm_up import warm_up

_PARTIAL_RESULTS = 8
"""Copies of a batch's rows that may be in memory at once: two that are merged, the merged one, queries, repeated K
and V, and the copies that kernels make. Counted, not measured."""


class CudaLayers:
    """All layers of a model over one device tier. One call at a time."""

    def __init__(
        self,
        tier: DeviceTier,
        attention: NativeAttention,
        kv_caches: Sequence[Tensor],
        capture: Capture | None = None,
    ) -> None:
        """Nothing is under way.

        kv_caches   the layers' host store, pinned if there is a GPU
        capture     captures repeated launches; None: they are launched each time
        """
        self._tier, self._attention = tier, attention
        self._device = tier.pool.key.device
        # Stores of chunks and loads of what they stored, in order, because a request may find in the prefix cache what
        # another one stores in the same step.
        self._queue = open_queue(self._device)
        self._prefill = StreamedPrefill(
            self._queue, attention.num_kv_heads, attention.head_dim, attention.dtype, attention.scale
        )
        self.tiered = TieredLayer(tier, attention)
        self._graphs = LaunchGraphs(capture)
        self._kv_caches = {tier.layer_of(kv_cache): kv_cache for kv_cache in kv_caches}
        self.prompt_rows = PromptRows(_latest_rows(tier.settings))
        self._stores = {
            layer: WriteThrough(tier.source(kv_cache), self._queue, _encoder(tier, layer))
            for layer, kv_cache in self._kv_caches.items()
        }

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        batch: DeviceBatch,
        output: Tensor,
        hgca: _native.HgcaLayer | None = None,
        fluxion: _native.FluxionLayer | None = None,
    ) -> None:
        """Store the batch's keys and values, summarise the pages they fill, attend, and write `output`.

        query, output   [tokens, q_heads, head_dim]    on the device; rows behind the batch's tokens are left alone
        key, value      [tokens, kv_heads, head_dim]   likewise
        kv_cache        the layer's host store
        hgca, fluxion   the policy's states of the layer's requests; needs the batch's slots
        """
        layer = self._tier.layer_of(kv_cache)
        store = self._stores[layer]
        stored = store.take() if batch.decode_tokens else None  # by earlier steps; nobody waits for it again
        copied, arrived = ([], None) if stored is None else self._start_copy((query, key, value), batch.decode_tokens)
        if batch.ranked:
            store.follow_codes()
        for chunk in batch.chunks:
            self._store(store, key, value, chunk)
        given = self._queue.mark() if batch.chunks else None
        store.encode_chunks()
        if batch.resident is not None:
            self._attend_resident(query, key, value, layer, batch.resident, output)
        for rows in batch.ranked:
            self._attend_ranked(query, key, value, layer, rows, output)
        for chunk in batch.chunks:
            self._prefill.attend(query, key, value, self._tier.source(kv_cache), chunk, output)
        if given is not None:
            self._give_back(given)
        latest = self._start_latest(query, batch.chunks)
        if stored is None:
            if self._tier.ranking is None:
                self.tiered.drop_pages(layer, batch.decode.written_pages)
            elif batch.decode.entering is not None and self._tier.residency is not None:
                self._tier.residency.enter(layer, batch.decode.entering, current_queue(self._device).mark())
            self.prompt_rows.add(layer, latest)
            return
        self._settle(kv_cache, stored)
        assert arrived is not None  # because there are two-tier rows
        arrived.wait()
        self.look_back(layer, batch.decode.slots, hgca, fluxion)
        self.prompt_rows.add(layer, latest)
        # The native core attends to none of these rows, so the tensor in the place of its output stays as it is.
        queries, keys, values = copied
        self.tiered.forward(
            queries,
            keys,
            values,
            kv_cache,
            batch.decode,
            queries,
            hgca,
            fluxion,
            device_output=(output, batch.decode_tokens),
        )

    def _attend_resident(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, rows: ResidentRows, output: Tensor
    ) -> None:
        """Launch the work of resident rows on vLLM's own queue. The host has no other part in it."""
        assert self._tier.residency is not None
        frames = self._tier.residency.frames(layer)
        if rows.ready is not None:
            current_queue(self._device).follow(rows.ready)
        store = self._stores[layer]

        def launch() -> None:
            new = TokenFrames(*frames, rows.new_frames, rows.new_places)
            store.launch_rows(rows.of(key), rows.of(value), rows.host_offsets, rows.host_places, new)
            self._tier.device.attend_frames(query, frames, rows, output, self._attention.scale)

        self._graphs.run(rows.launch_key(layer, query, key, value, output), launch)
        store.rows_stored(rows.filled_pages)

    def _attend_ranked(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, rows: RankedRows, output: Tensor
    ) -> None:
        """Launch the work of ranked rows, likewise."""
        assert self._tier.ranking is not None
        ranking, store = self._tier.ranking, self._stores[layer]
        fills = len(rows.filled_pages) > 0  # if so, these are summarised before the attention
        if fills:
            new = rows.of(key), rows.of(value), rows.host_offsets, rows.host_places
            store.store_rows(*new, None, rows.filled_pages)

        def launch() -> None:
            if not fills:
                store.launch_rows(rows.of(key), rows.of(value), rows.host_offsets, rows.host_places, None)
            ranking.attend(layer, query, rows, output, self._attention.scale)

        self._graphs.run((fills, rows.launch_key(layer, query, key, value, output)), launch)
        if not fills:
            store.rows_stored(())

    def warm_up(self) -> None:
        """Compile the kernels that serving launches, for a context that is made up. It leaves nothing behind."""
        warm_up(self._tier, self._attention, self._tier.source(self._kv_caches[0]))

    def look_back(
        self,
        layer: int,
        slots: Sequence[int],
        hgca: _native.HgcaLayer | None,
        fluxion: _native.FluxionLayer | None,
    ) -> None:
        """Show the policy the prompts that wait in some slots. The host store has their keys and values."""
        taken = self.prompt_rows.take(layer, slots)
        if hgca is not None:
            reevaluate(self._attention, hgca, self._kv_caches[layer], taken)
        if fluxion is not None:
            keep_queries(self._attention, fluxion, taken)

    @staticmethod
    def working_bytes(q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tokens: int) -> int:
        """Device memory that a step of this many tokens takes besides the slots: staging, partial results, and ranking.

        vLLM's profiling does not see it, because no layer attends during profiling.
        """
        staging = StreamedPrefill.staging_bytes(kv_heads, head_dim, dtype)
        of_rows = tokens * q_heads * (head_dim + 1) * torch.float32.itemsize
        ranking = ranking_bytes(q_heads, kv_heads)
        return staging + _PARTIAL_RESULTS * of_rows + ranking

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, `(from, to)`, in the host store of every layer, before the step that reads them."""
        if not copies:
            return
        sources, targets = (list(blocks) for blocks in zip(*copies, strict=True))
        for layer, kv_cache in self._kv_caches.items():
            self._settle(kv_cache, self._stores[layer].take())
            self._stores[layer].wait_for_codes()
            kv_cache[targets] = kv_cache[sources]
            self._tier.encode_blocks(kv_cache, targets)

    def _start_copy(self, parts: Sequence[Tensor], tokens: Sequence[int]) -> tuple[list[Tensor], Mark]:
        """Start to copy rows of device tensors to pinned memory. They have arrived once the mark has passed."""
        rows = []
        if tokens:
            index = upload(torch.tensor(tokens, dtype=torch.int64), self._device)
            for part in parts:
                chosen = part.index_select(0, index)
                rows.append(host_empty(tuple(chosen.shape), chosen.dtype, self._device))
                rows[-1].copy_(chosen, non_blocking=True)
        return rows, current_queue(self._device).mark()

    def _start_latest(self, query: Tensor, chunks: Sequence[PromptChunk]) -> list[Arriving]:
        """Start to copy to host memory the queries that the policy will look back at."""
        lengths = [min(chunk.tokens, self.prompt_rows.wanted(chunk.seq_len)) for chunk in chunks]
        ends = [chunk.first_token + chunk.tokens for chunk in chunks]
        tokens = [token for end, length in zip(ends, lengths, strict=True) for token in range(end - length, end)]
        if not tokens:
            return []
        (queries,), arrived = self._start_copy((query,), tokens)
        return [
            Arriving(LatestRows(chunk.slot, rows, chunk.seq_len, chunk.block_table), arrived)
            for chunk, rows in zip(chunks, queries.split(lengths), strict=True)
        ]

    def _store(self, store: WriteThrough, key: Tensor, value: Tensor, chunk: PromptChunk) -> None:
        tokens = slice(chunk.first_token, chunk.first_token + chunk.tokens)
        self._queue.follow(current_queue(self._device).mark())
        store.store(key[tokens], value[tokens], chunk.context_tokens, chunk.written_pages)

    def _give_back(self, stored: Mark) -> None:
        """Make later work follow the stores of prompts, as captured graphs overwrite keys and values anyway.

        So torch need not be told that the stores read them (`keep`). If it were told, it would hold the keys and values
        of all layers that the host has launched ahead, and no estimate counts that memory.
        """
        current_queue(self._device).follow(stored)

    def _settle(self, kv_cache: Tensor, stored: Stored) -> None:
        """Wait until the host store holds what was stored, and make the missing summaries."""
        stored.wait()
        if stored.blocks and self._attention.summary != "none":
            self._attention.summarize(kv_cache, torch.tensor(stored.blocks, dtype=torch.int32))


def _encoder(tier: DeviceTier, layer: int) -> Encode | None:
    """The function that summarises a layer's pages on the device; None if the device does not rank them."""
    ranking = tier.ranking
    return partial(ranking.encode, layer) if ranking is not None else None


def _latest_rows(settings: HybridSparseConfig) -> Callable[[int], int]:
    """How many of a prompt's latest rows the policy looks back at, given the tokens of the request."""
    if settings.salience is not None:
        return judging_rows
    wanted = 0 if settings.prediction is None else 1
    return lambda _: wanted
