"""One attention layer, as vLLM calls it."""

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue.metadata import HybridSparseMetadata
from vllm_hybrid_sparse.glue.settings import settings_of
from vllm_hybrid_sparse.glue.support import (
    FP8,
    cutting_window,
    kv_dtype,
    model_shape,
    refuse_beside_window,
    refuse_sinks,
)
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch
from vllm_hybrid_sparse.runtime.device_batch import DeviceBatch
from vllm_hybrid_sparse.runtime.host import host_runtime
from vllm_hybrid_sparse.runtime.step import TieredLayer
from vllm_hybrid_sparse.runtime.tiered_batch import TieredBatch

_WITHOUT_EFFECT = ("layer_idx",)  # vLLM gives it to some layers; attention does not depend on it
_NO_CHUNKS = -1  # the `chunk_lookback` that vLLM's layers without chunks give (Rnj-1)


class HybridSparseImpl(AttentionImpl[HybridSparseMetadata]):
    """Appends a step's keys and values and attends, in one native call or sharing the decode rows with a device.

    Raises ConfigError for arguments that it does not support.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        chunk_lookback: int | None = None,
        **extra: Any,
    ) -> None:
        vllm_config = get_current_vllm_config()
        for name, given, why in (
            ("alibi_slopes", alibi_slopes, "ALiBi position biases are not supported"),
            ("logits_soft_cap", logits_soft_cap or None, "soft-capped attention logits are not supported"),
            (
                "chunk_lookback",
                None if chunk_lookback == _NO_CHUNKS else chunk_lookback,
                "chunked local attention is not supported",
            ),
            *((name, given, "not supported") for name, given in extra.items() if name not in _WITHOUT_EFFECT),
        ):
            if given is not None:
                raise ConfigError(f"{name}={given}: {why} (attention backend hybrid_sparse)")
        if attn_type != AttentionType.DECODER:
            raise ConfigError(
                f"attn_type={attn_type}: only decoder attention is supported (attention backend hybrid_sparse)"
            )
        self.stored_dtype = kv_dtype(kv_cache_dtype, vllm_config.model_config.dtype)
        self._runtime = host_runtime(settings_of(vllm_config))
        if kv_sharing_target_layer_name is not None and self._runtime.settings.device == "cuda":
            raise ConfigError(
                f"kv_sharing_target_layer_name={kv_sharing_target_layer_name}: layers that share a cache are not "
                "supported on cuda (attention backend hybrid_sparse)"
            )
        if (window := cutting_window(sliding_window, vllm_config)) is not None:
            refuse_beside_window(window, self._runtime.settings, vllm_config)
        if sinks is not None:
            refuse_sinks(self._runtime.settings)
        self._sinks_parameter = sinks
        # Their values in float32. Every call takes them anew, because weights may be updated in place without a sign.
        self._sinks = None if sinks is None else torch.empty(sinks.shape, dtype=torch.float32, device="cpu")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        # A layer that shares another's cache must not write it a second time.
        self._appends = kv_sharing_target_layer_name is None
        self._sliding_window = window or 0
        self._selection = self._runtime.everything if window else self._runtime.selection
        if self._runtime.settings.prediction is not None:
            self._runtime.use_model(model_shape(vllm_config))
        self._fluxion: _native.FluxionLayer | None = None  # made at the first call, which names the layer
        self._tiered: TieredLayer | None = None  # made once the device tier exists

    def lay_out(self, block_tokens: int) -> None:
        """Make the kernel, for blocks of `block_tokens` tokens. The worker calls this before the first step.

        vLLM settles `block_tokens` once it knows all layers. It makes a block of attention as large as the state of a
        layer that keeps one. If heads differ in size, the blocks of the smaller ones hold more tokens.
        """
        self.attention = self._runtime.attention(
            dtype=self.stored_dtype,
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            block_tokens=block_tokens,
            scale=self.scale,
            sliding_window=self._sliding_window,
        )
        self._hgca = self._runtime.hgca_layer(self.attention)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: HybridSparseMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend in one layer for one step; writes and returns `output`.

        query, output   [tokens, q_heads, head_dim]
        key, value      [tokens, kv_heads, head_dim]
        kv_cache        [blocks, kv_heads, block_tokens, state_content]   the layout is ours (`memory/layout.py`)

        On CUDA too, the KV cache lies in host memory. vLLM splits its piecewise graphs at attention, so this runs
        between two of them.
        """
        if output_scale is not None or output_block_scale is not None:
            name, given = "output_scale", output_scale
            if given is None:
                name, given = "output_block_scale", output_block_scale
            raise ConfigError(
                f"{name}={given}: fused output quantisation is not supported (attention backend hybrid_sparse)"
            )
        if self._fluxion is None and self._runtime.settings.prediction is not None:
            self._fluxion = self._runtime.fluxion_layer(extract_layer_index(layer.layer_name))
        if attn_metadata is None or attn_metadata.batch is None:  # vLLM profiles, warms up or captures
            return output.zero_()
        loaded = self._runtime.loaded_blocks
        if loaded is not None and self._appends:
            self.attention.summarize(kv_cache, loaded.blocks, loaded.starts)
            if self._runtime.device_tier is not None:
                self._runtime.device_tier.encode_blocks(kv_cache, loaded.blocks.tolist())
        batch = attn_metadata.batch
        if isinstance(batch, DeviceBatch):
            layers = self._runtime.cuda_layers
            assert layers is not None, "the worker opens the device before the first step"
            assert key is not None
            assert value is not None
            layers.forward(query, key, value, kv_cache, batch, output, self._hgca, self._fluxion)
            return output
        if not self._appends:
            key = value = None
        k_scale, v_scale = (layer._k_scale_float, layer._v_scale_float) if self.stored_dtype == FP8 else (1.0, 1.0)
        rows = self.attention.dtype
        if query.dtype == rows and k_scale == v_scale == 1.0:
            self._attend(query, key, value, kv_cache, batch, output)
            return output
        # The KV cache is narrower than the model, or holds keys and values divided by the checkpoint's scales.
        keys = None if key is None else _scaled(key, 1 / k_scale).to(rows)
        values = None if value is None else _scaled(value, 1 / v_scale).to(rows)
        rounded = output.to(rows)
        self._attend(_scaled(query, k_scale).to(rows), keys, values, kv_cache, batch, rounded)
        return output.copy_(_scaled(rounded, v_scale))

    def _attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        batch: NativeBatch | TieredBatch,
        output: Tensor,
    ) -> None:
        """Append and attend; all tensors of rows have the kernel's row dtype (`NativeAttention.dtype`)."""
        if isinstance(batch, TieredBatch):
            self._tiered_layer().forward(query, key, value, kv_cache, batch, output, self._hgca, self._fluxion)
        else:
            if self._sinks is not None:
                assert self._sinks_parameter is not None
                self._sinks.copy_(self._sinks_parameter.detach())
            self.attention.forward(
                query,
                key,
                value,
                kv_cache,
                batch,
                self._selection,
                None,
                output,
                self._hgca,
                self._fluxion,
                self._sinks,
            )

    def _tiered_layer(self) -> TieredLayer:
        """The executor over the worker's device tier, made at the first call because the tier follows the layers."""
        if self._tiered is None:
            tier = self._runtime.device_tier
            assert tier is not None, "the worker opens the device before the first step"
            self._tiered = TieredLayer(tier, self.attention)
        return self._tiered


def _scaled(rows: Tensor, factor: float) -> Tensor:
    return rows if factor == 1.0 else rows * factor
