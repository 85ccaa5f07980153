"""The attention backend as vLLM sees it: its name, its limits, and how much memory a block takes."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue.registration import BACKEND_NAME
from vllm_hybrid_sparse.glue.settings import settings_of
from vllm_hybrid_sparse.glue.support import KV_CACHE_DTYPES
from vllm_hybrid_sparse.kernels.paged_attention.native import DTYPE_NAMES
from vllm_hybrid_sparse.values import PAGE_TOKENS, head_dim_fits, summary_bytes

_LEAST_COMPUTE_CAPABILITY = 8


class HybridSparseBackend(AttentionBackend):
    """Decode attention over selected pages of a KV cache in host memory; prefill is exact."""

    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPE_NAMES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *KV_CACHE_DTYPES]

    @staticmethod
    def get_name() -> str:
        """The registered name, by which vLLM finds this class again."""
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """The implementation of one layer."""
        from vllm_hybrid_sparse.glue.impl import HybridSparseImpl  # noqa: PLC0415  (loads the native core)

        return HybridSparseImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """The builder of a step's metadata."""
        from vllm_hybrid_sparse.glue.metadata import HybridSparseMetadataBuilder  # noqa: PLC0415

        return HybridSparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:  # noqa: ARG004
        """Any block of whole pages."""
        return [MultipleOf(PAGE_TOKENS)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whole vectors of 16 elements, up to MAX_HEAD_DIM."""
        return head_dim_fits(head_size)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes. With a device, `support.py` refuses layers that have a window and says what to do."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes. With a device, `support.py` refuses learned sinks."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """GPUs with bf16 and Triton's matrix instructions for it: Ampere and later. Only an H200 has run it so far."""
        return bool(capability.major >= _LEAST_COMPUTE_CAPABILITY)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks one after another; within a block, KV heads one after another."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Give every block room for its summaries, so that vLLM's capacity figures count them.

        For vLLM a block holds [block_tokens, state_content_bytes] for each KV head: K and V of a token, and a sixteenth
        of its page's summary. The layout inside is ours (`memory/layout.py`). Raises ConfigError for a layer whose
        prompts attend to later tokens, and for a worker that is not this backend's.
        """
        from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415

        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is None:  # vLLM's own workers set no current configuration here
            raise ConfigError(
                "worker_cls: must be auto, or a subclass of the worker that the backend hybrid_sparse brings"
            )
        if getattr(spec, "non_causal", False):
            raise ConfigError("non_causal=True: prefix-LM prompts are not supported (attention backend hybrid_sparse)")
        settings = settings_of(vllm_config)
        element_bytes = spec.dtype.itemsize
        row_bytes = max(element_bytes, torch.bfloat16.itemsize)  # bounds and centres are never narrower than bf16
        page_summary = summary_bytes(settings.page_summary, spec.head_size, row_bytes, settings.page_code_bits)
        content_bytes = 2 * spec.head_size * element_bytes + page_summary // PAGE_TOKENS
        return replace(spec, state_content_bytes=content_bytes)
