"""Two-tier rows under Fluxion: the device attends the retained set in its two segments, the host predicts from that
what each head needs, and both read the candidates from one queue (Fluxion, sections 5 and 6).

Anchors are observed on the host, where all keys and values lie. Once in 257 rows this reads a request's cache twice.
"""

import time
from collections.abc import Sequence
from concurrent.futures import wait
from functools import reduce
from operator import add

from torch import Tensor

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.kernels.fluxion.native import PredictedPages, choose_pages
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention, native_selection
from vllm_hybrid_sparse.metrics import DecodeStats, TierStats
from vllm_hybrid_sparse.runtime.both_sides import BothSides
from vllm_hybrid_sparse.runtime.decode_rows import DecodeRows
from vllm_hybrid_sparse.runtime.host_side import HostSide
from vllm_hybrid_sparse.runtime.readings import Reading
from vllm_hybrid_sparse.runtime.tiered_batch import TieredBatch
from vllm_hybrid_sparse.runtime.tiers import DeviceTier
from vllm_hybrid_sparse.values import PAGE_TOKENS, GroupKey


class PredictedRows:
    """Decode rows of layers of one shape. One call at a time."""

    def __init__(self, tier: DeviceTier, attention: NativeAttention, host: HostSide) -> None:
        settings = tier.settings
        self._tier, self._attention, self._host = tier, attention, host
        self._sides = BothSides(tier, host)
        self._candidates = settings.retained.candidate_range
        self._microbatch_pages = settings.selection.microbatch_pages
        self._attributed = settings.selection.attributed
        self._selection = native_selection(settings.selection, settings.retained)

    def decode(
        self,
        query: Tensor,
        kv_cache: Tensor,
        batch: TieredBatch,
        layer: _native.FluxionLayer,
        output: Tensor,
        output_rows: Sequence[int],
    ) -> None:
        """Compute the attention of the batch's decode rows, whose keys and values are stored.

        query    [tokens, q_heads, head_dim]   of the step, in host memory
        layer    the state of the requests in this layer
        output   [any, q_heads, head_dim]      where the device gives its results, with a row for each decode row
        """
        started = time.perf_counter()
        device = self._tier.device
        step = DecodeRows.begin(self._tier, self._host, self._attention.scale, query, kv_cache, batch)
        retained, chosen = self._attend_retained(step, layer)
        states = step.rows.states
        alone = None
        if self._attributed and bool(chosen.log_unread.isfinite().any()):
            alone = device.copied(states)
        read = self._sides.read(step, {group: self._reading(step, group, chosen) for group in step.groups()})
        if alone is not None:
            device.attribute(states, alone, chosen.log_unread, self._attributed)
        device.give(states, output, output_rows)
        # The choice of pages has already counted how much of the cache is read.
        self._tier.count(retained + read.stats + TierStats(step_s=time.perf_counter() - started), DecodeStats())

    def _attend_retained(self, step: DecodeRows, layer: _native.FluxionLayer) -> tuple[TierStats, PredictedPages]:
        """Let the device attend sink and window, each with its own states, and choose pages by these states."""
        device, batch = self._tier.device, step.batch
        sink = step.beside()
        attending = [
            sink.start("sink", lambda tokens: range(self._candidates(tokens)[0]), self._microbatch_pages),
            step.start(
                "window",
                lambda tokens: range(self._candidates(tokens)[1], -(-tokens // PAGE_TOKENS)),
                self._microbatch_pages,
            ),
        ]
        wait(attending)  # if this step fails, nothing of it may still run
        results = [part.finish(future) for part, future in zip((sink, step), attending, strict=True)]
        of_sink, of_local = device.brought(sink.rows.states, step.rows.states)
        chosen = choose_pages(
            self._attention,
            layer,
            self._selection,
            step.kv_cache,
            step.queries,
            batch.stored,
            of_sink,
            of_local,
        )
        device.join(step.rows.states, sink.rows.states)
        return reduce(add, (result.stats for result in results)), chosen

    def _reading(self, step: DecodeRows, group: GroupKey, chosen: PredictedPages) -> Reading:
        """Everything that was chosen for a group: a budget is read whole."""
        return Reading(
            group=group,
            pages=chosen.pages[group],
            seq_len=step.batch.seq_lens[group.row],
            microbatch_pages=self._microbatch_pages,
        )
