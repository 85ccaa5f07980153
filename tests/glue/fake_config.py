"""The parts of vLLM's configurations and platforms that the plugin reads; `test_support.py` checks the names."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import platforms
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_hybrid_sparse.glue.platform_hook import hook_platform

SELECTOR = AttentionSelectorConfig(head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None)


def platform_of(monkeypatch: pytest.MonkeyPatch, *, on_cuda: bool) -> Any:
    """A stand-in for vLLM's platform, hooked and current. `asked` lists the calls that reached vLLM's own methods."""

    class Platform:
        asked: list[Any] = []  # noqa: RUF012
        refuses = False

        @classmethod
        def get_attn_backend_cls(cls, backend: Any, selector: Any, **_: Any) -> str:  # noqa: ARG003
            cls.asked.append(backend)
            if cls.refuses:
                raise ValueError("compute capability not supported")
            return "vllm's"

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            cls.asked.append(vllm_config)

        @classmethod
        def update_block_size_for_backend(cls, vllm_config: Any) -> None:  # noqa: ARG003
            cls.asked.append(get_current_vllm_config_or_none())

    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cuda=lambda: on_cuda))
    hook_platform(Platform, on_cuda=on_cuda)
    return Platform


def cache_of(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "cache_dtype": "auto",
        "block_size": None,
        "kv_offloading_size": None,
        "kv_offloading_backend": "native",
        "kv_cache_memory_bytes": None,
        "kv_sharing_fast_prefill": False,
    }
    return SimpleNamespace(**(given | changes))


def parallel_of(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "worker_cls": "auto",
        "local_world_size": 1,
        "tensor_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "data_parallel_rank_local": None,
        "data_parallel_external_lb": False,
        "enable_elastic_ep": False,
        "use_ubatching": False,
        "enable_dbo": False,
        "ubatch_size": 0,
    }
    return SimpleNamespace(**(given | changes))


def model_of(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "model": "some/model",
        "dtype": torch.bfloat16,
        "use_mla": False,
        "is_encoder_decoder": False,
        "is_hybrid": False,
        "is_attention_free": False,
        "max_model_len": 8192,
        "is_mm_prefix_lm": False,
        "enable_sleep_mode": False,
        "get_sliding_window": lambda: None,
        "get_head_size": lambda: 64,
        "get_num_attention_heads": lambda _parallel: 8,
        "get_num_kv_heads": lambda _parallel: 2,
        "hf_text_config": SimpleNamespace(),
    }
    return SimpleNamespace(**(given | changes))


def config_of(backend: Any, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "attention_config": SimpleNamespace(backend=backend, backend_per_kind={}),
        "parallel_config": parallel_of(),
        "scheduler_config": SimpleNamespace(async_scheduling=True, scheduler_cls=None),
        "additional_config": {},
        "cache_config": cache_of(),
        "speculative_config": None,
        "model_config": None,
        "kv_transfer_config": None,
        "use_v2_model_runner": False,
        "watermark_config": None,
    }
    return SimpleNamespace(**(given | changes))
