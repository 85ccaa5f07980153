"""One step of one layer with a device: what is stored, prompts, and decode rows by the policy.

The host store stays the truth. The native core appends to it, and computes prefill rows and summaries as it does
without a device. Decode rows are left to the policies' executors.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention, native_selection
from vllm_hybrid_sparse.memory.page_keys import page_numbers
from vllm_hybrid_sparse.runtime.host_side import HostSide
from vllm_hybrid_sparse.runtime.page_rows import PageRows
from vllm_hybrid_sparse.runtime.predicted_rows import PredictedRows
from vllm_hybrid_sparse.runtime.residency import ResidentRows
from vllm_hybrid_sparse.runtime.salient_rows import SalientRows
from vllm_hybrid_sparse.runtime.tiered_batch import TieredBatch
from vllm_hybrid_sparse.runtime.tiers import DeviceTier
from vllm_hybrid_sparse.values import PAGE_TOKENS


class TieredLayer:
    """Layers of one shape whose decode rows a device and its host share. One call at a time."""

    def __init__(self, tier: DeviceTier, attention: NativeAttention) -> None:
        settings = tier.settings
        self._tier = tier
        self._attention = attention
        self._kv_heads = np.arange(attention.num_kv_heads)
        self._selection = native_selection(settings.selection, settings.retained)
        host = HostSide(attention)
        self._pages = PageRows(tier, attention, host)
        self._salient = SalientRows(tier, attention, host)
        self._predicted = PredictedRows(tier, attention, host)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        batch: TieredBatch,
        output: Tensor,
        hgca: _native.HgcaLayer | None = None,
        fluxion: _native.FluxionLayer | None = None,
        *,
        device_output: tuple[Tensor, Sequence[int]] | None = None,
    ) -> None:
        """Append the batch's keys and values, summarise the pages they fill, attend, and write `output`.

        The arguments are those of `NativeAttention.forward`.

        device_output   where the decode rows' attention goes instead of to `output`: a tensor that the device writes,
                        and its row for each decode row
        """
        self._attention.forward(query, key, value, kv_cache, batch.native, self._selection, None, output, hgca, fluxion)
        layer = self._tier.layer_of(kv_cache)
        if key is not None and value is not None:
            self._write_through(key, value, layer, batch)
        if batch.resident is not None:
            self._attend_resident(query, key, value, layer, batch.resident, output)
        for ranked in batch.ranked:
            assert self._tier.ranking is not None
            self._tier.ranking.attend(layer, query, ranked, output, self._attention.scale)
        if batch.rows:
            self._decode(query, kv_cache, batch, hgca, fluxion, device_output or (output, batch.rows))
        if batch.entering is not None and self._tier.residency is not None:
            self._tier.residency.enter(layer, batch.entering)

    def _decode(
        self,
        query: Tensor,
        kv_cache: Tensor,
        batch: TieredBatch,
        hgca: _native.HgcaLayer | None,
        fluxion: _native.FluxionLayer | None,
        target: tuple[Tensor, Sequence[int]],
    ) -> None:
        if hgca is not None:
            self._salient.decode(query, kv_cache, batch, hgca, *target)
        elif fluxion is not None:
            self._predicted.decode(query, kv_cache, batch, fluxion, *target)
        else:
            self._pages.decode(query, kv_cache, batch, *target)

    def _attend_resident(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, layer: int, rows: ResidentRows, output: Tensor
    ) -> None:
        """Compute resident rows whose tensors lie in host memory."""
        assert self._tier.residency is not None
        frames = self._tier.residency.frames(layer)
        if key is not None and value is not None:
            for stored, new in zip(frames, (key, value), strict=True):
                stored[rows.new_frames, :, rows.new_places] = rows.of(new)
        self._tier.device.attend_frames(query, frames, rows, output, self._attention.scale)

    def _write_through(self, key: Tensor, value: Tensor, layer: int, batch: TieredBatch) -> None:
        """Keep the pool true: drop pages that prefill has written, and write two-tier rows' tokens to the pool as well.

        Pages that resident rows write have no single slots: `Residency` and `Loader.fill_frames` have freed them.
        If the device ranks, it is told of written pages once a step, and gets codes here for those that may be full.
        """
        if self._tier.ranking is not None:
            rows = [*batch.ranked, *([] if batch.resident is None else [batch.resident])]
            filled = [page for of_kind in rows for page in of_kind.filled_pages]
            self._tier.ranking.encode(layer, [*batch.written_pages, *filled])
            return
        self.drop_pages(layer, batch.written_pages)
        stored = [(row, slot) for row, slot in zip(batch.rows, batch.new_slots, strict=True) if slot >= 0]
        if stored:
            tokens, slots = map(list, zip(*stored, strict=True))
            pages, offsets = np.divmod(np.array(slots, dtype=np.int64), PAGE_TOKENS)
            self._tier.loader.append(
                page_numbers(layer, self._kv_heads, pages[:, None]).ravel(),
                offsets.repeat(len(self._kv_heads)),
                key[tokens].flatten(0, 1),
                value[tokens].flatten(0, 1),
            ).result()

    def drop_pages(self, layer: int, pages: Sequence[int]) -> None:
        """Drop written pages of the host store from the pool, for all KV heads of a layer."""
        if pages:
            numbers = page_numbers(layer, self._kv_heads, np.array(pages, dtype=np.int64)[:, None])
            self._tier.loader.forget(numbers).result()
