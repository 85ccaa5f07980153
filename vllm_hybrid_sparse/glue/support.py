"""Refuses at start-up what the backend does not serve. Each error names the option, its value and the reason."""

from typing import Any, NoReturn

import torch

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue.connectors import unserved_connector
from vllm_hybrid_sparse.glue.local_workers import started_alone
from vllm_hybrid_sparse.glue.settings import settings_of
from vllm_hybrid_sparse.kernels.arguments import MAX_DEVICE_HEAD_DIM, device_fits
from vllm_hybrid_sparse.kernels.paged_attention.native import DTYPE_NAMES, supported_isas
from vllm_hybrid_sparse.predictor.choice import choose_predictor
from vllm_hybrid_sparse.predictor.model import ModelShape
from vllm_hybrid_sparse.runtime.tiers import check_pool_pages
from vllm_hybrid_sparse.values import PAGE_TOKENS, head_dim_fits, head_dim_rule

FP8 = torch.float8_e4m3fn
KV_CACHE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": FP8, "fp8_e4m3": FP8}
"""The KV cache's dtypes besides the model's own (`auto`), by vLLM's names."""

_DRAFTS_WITHOUT_A_MODEL = "ngram"
_FILLING_CONNECTOR = "DecodeBenchConnector"  # vLLM's, for benchmarks: it writes the cache's tensors in place


def refuse_config(vllm_config: Any) -> None:
    """Check a whole configuration before any process is started. Raises ConfigError."""
    settings = settings_of(vllm_config)
    if settings.isa not in ("auto", *supported_isas()):
        raise ConfigError(f"hybrid_sparse.isa={settings.isa!r}: this machine runs {', '.join(supported_isas())}")
    _refuse_cache(vllm_config.cache_config, vllm_config.model_config)
    if vllm_config.speculative_config is not None:
        _refuse_speculation(settings, vllm_config)
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            _refuse(name, size, "context parallelism is not supported")
    if vllm_config.model_config is not None:
        _refuse_model(vllm_config.model_config)
        _refuse_with_model(settings, vllm_config)
    if settings.device == "cuda":
        _refuse_on_cuda(vllm_config)
    else:
        _refuse_without_a_gpu(vllm_config)


def _refuse_without_a_gpu(vllm_config: Any) -> None:
    """Refuse what needs a GPU."""
    if vllm_config.use_v2_model_runner:
        if (watermark := vllm_config.watermark_config) is not None:  # it overrides the variable
            _refuse(
                "watermark_config", watermark, "watermarks need model runner V2, which is not supported without a GPU"
            )
        _refuse("VLLM_USE_V2_MODEL_RUNNER", "1 (the default with triton-cpu)", "must be 0 without a GPU")
    if (size := vllm_config.parallel_config.ubatch_size) > 1:  # vLLM itself turns enable_dbo off
        _refuse("ubatch_size", size, "steps in two or more microbatches are not supported without a GPU")
    cache, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    if cache.kv_offloading_size is not None and cache.kv_offloading_backend == "native":
        rule = "must not be given without a GPU, where the whole cache is in host memory"
        _refuse("kv_offloading_size", cache.kv_offloading_size, rule)
    if transfer is not None and (unserved := unserved_connector(transfer)) is not None:
        name, reason = unserved
        _refuse("kv_connector", name, reason)


def _refuse_on_cuda(vllm_config: Any) -> None:
    """Refuse what the CPU serves but a GPU does not yet."""
    cache, model, parallel = vllm_config.cache_config, vllm_config.model_config, vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    connector = None if transfer is None else transfer.kv_connector
    if connector not in (None, _FILLING_CONNECTOR):
        _refuse("kv_connector", connector, "KV connectors are not supported on cuda, where the cache is in host memory")
    if (offloaded := cache.kv_offloading_size) is not None:
        _refuse("kv_offloading_size", offloaded, "must not be given on cuda, where the whole cache is in host memory")
    if parallel.use_ubatching:
        name = "enable_dbo" if parallel.enable_dbo else "ubatch_size"
        _refuse(name, getattr(parallel, name), "steps in two or more microbatches are not supported on cuda")
    if parallel.enable_elastic_ep:
        _refuse("enable_elastic_ep", True, "workers that come and go while a server runs are not supported on cuda")
    if cache.kv_cache_memory_bytes is None and (alone := started_alone(parallel)) is not None:
        rule = (
            "needs --kv-cache-memory-bytes on cuda: that is host memory, and a rank that is started by itself does not "
            "know how many share this machine"
        )
        _refuse(*alone, rule)
    if model is None:
        return
    if kv_dtype(cache.cache_dtype, model.dtype) != model.dtype:
        _refuse("kv_cache_dtype", cache.cache_dtype, f"must be the model's own dtype on cuda, {model.dtype}")
    if model.get_head_size() > MAX_DEVICE_HEAD_DIM:
        _refuse("head_size", model.get_head_size(), f"must be at most {MAX_DEVICE_HEAD_DIM} on cuda")
    group = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
    if not device_fits(group, model.get_head_size(), model.dtype):
        rule = (
            f"with {group} query heads to a KV head of {model.get_head_size()} is not supported on cuda: it needs more "
            "shared memory than many GPUs have; --dtype bfloat16"
        )
        _refuse("dtype", model.dtype, rule)
    if model.enable_sleep_mode:
        rule = "sleep is not supported on cuda: it would free neither the pool of page slots nor the host store"
        _refuse("enable_sleep_mode", True, rule)


def _refuse_cache(cache: Any, model: Any) -> None:
    if model is not None:
        kv_dtype(cache.cache_dtype, model.dtype)
    if cache.block_size is not None and cache.block_size % PAGE_TOKENS:
        _refuse("block_size", cache.block_size, f"must be a multiple of {PAGE_TOKENS}")
    if cache.kv_sharing_fast_prefill:
        rule = "is not supported: vLLM does not say which rows of layers that skip prompts are a prompt's"
        _refuse("kv_sharing_fast_prefill", True, rule)


def _refuse_speculation(settings: HybridSparseConfig, vllm_config: Any) -> None:
    """Refuse drafts from a model with a KV cache of its own, and combinations that cannot take tokens back."""
    method = vllm_config.speculative_config.method
    if method != _DRAFTS_WITHOUT_A_MODEL:
        rule = f"only {_DRAFTS_WITHOUT_A_MODEL} is supported, whose drafts come from the text"
        _refuse("speculative_config.method", method, rule)
    others = _beyond_page_policies(settings, vllm_config)
    model = vllm_config.model_config
    if model is not None and model.is_hybrid:
        others.append("layers that keep a state")
    for other in others:
        _refuse("speculative_config.method", method, f"speculative decoding is not supported with {other}")


def _refuse_model(model: Any) -> None:
    if model.is_attention_free:
        _refuse("model", model.model, "models without attention layers are not supported: they have no KV cache")
    if model.use_mla:
        _refuse("model", model.model, "multi-head latent attention (MLA) is not supported")
    if model.is_encoder_decoder:
        _refuse("model", model.model, "encoder-decoder models are not supported")
    if model.is_mm_prefix_lm:
        rule = (
            "bidirectional attention over multimodal prefixes is not supported; --language-model-only serves its text"
        )
        _refuse("model", model.model, rule)
    if model.dtype not in DTYPE_NAMES:
        _refuse("dtype", model.dtype, "must be bfloat16, float16 or float32")
    text = model.hf_text_config  # its attributes differ between models: most have none of these
    for name, why in (
        ("attn_logit_softcapping", "soft-capped attention logits are not supported"),
        ("attention_chunk_size", "chunked local attention is not supported"),
        ("dual_chunk_attention_config", "dual-chunk attention is not supported"),
    ):
        if getattr(text, name, None):
            _refuse(name, getattr(text, name), why)
    if getattr(text, "alibi", False) or getattr(text, "model_type", "") == "bloom":
        _refuse("alibi", True, "ALiBi position biases are not supported")
    head_dim = model.get_head_size()
    if not head_dim_fits(head_dim):
        _refuse("head_size", head_dim, head_dim_rule())


def _refuse_with_model(settings: HybridSparseConfig, vllm_config: Any) -> None:
    """Refuse settings that do not go with the model, which other settings can serve."""
    model = vllm_config.model_config
    if (window := cutting_window(model.get_sliding_window(), vllm_config)) is not None:
        refuse_beside_window(window, settings, vllm_config)
    if model.is_hybrid:
        for other in _beyond_page_policies(settings, vllm_config):
            _refuse("model", model.model, f"layers that keep a state are not supported with {other}")
    if settings.prediction is not None:
        _refuse_predictor(settings, vllm_config)
    cache = vllm_config.cache_config
    if settings.device != "none" and kv_dtype(cache.cache_dtype, model.dtype) == FP8:
        _refuse("kv_cache_dtype", cache.cache_dtype, f"is not supported with device={settings.device}")
    if settings.device != "none" and settings.device_pool_pages is not None:
        check_pool_pages(settings, settings.device_pool_pages, model.get_num_layers(vllm_config.parallel_config))


def cutting_window(window: int | None, vllm_config: Any) -> int | None:
    """A layer's sliding window in tokens, None if it has none or none that any request is too long for.

    With --max-model-len auto, vLLM begins with the most that the model serves, and may only lower it later.
    """
    return None if window is None or window >= vllm_config.model_config.max_model_len else window


def refuse_beside_window(window: int, settings: HybridSparseConfig, vllm_config: Any) -> None:
    """Refuse what cannot be combined with layers that have a sliding window. Raises ConfigError."""
    for other in _beyond_page_policies(settings, vllm_config):
        rule = (
            f"is not supported with {other}; --disable-sliding-window serves the model in requests of up to so many "
            "tokens, none of which a window cuts off"
        )
        _refuse("sliding_window", window, rule)


def refuse_sinks(settings: HybridSparseConfig) -> None:
    """Refuse what cannot be combined with learned attention sinks (gpt-oss). Raises ConfigError."""
    for other in _beyond_page_policies(settings):
        _refuse("has_sink", True, f"learned attention sinks are not supported with {other}")


def _beyond_page_policies(settings: HybridSparseConfig, vllm_config: Any = None) -> list[str]:
    """Settings that ask for more than page policies on the host: a policy with state, a device, a KV connector.

    vllm_config   None: leaves KV connectors out, which are supported then
    """
    keeps_state = settings.salience is not None or settings.prediction is not None
    return [
        *([f"policy={settings.policy}"] if keeps_state else []),
        *([f"device={settings.device}"] if settings.device != "none" else []),
        *([] if vllm_config is None else _connectors(vllm_config)),
    ]


def _connectors(vllm_config: Any) -> list[str]:
    """The setting that brings a KV connector. vLLM makes one from `kv_offloading_size` after asking the platform."""
    offloaded, transfer = vllm_config.cache_config.kv_offloading_size, vllm_config.kv_transfer_config
    if offloaded is not None:
        return [f"kv_offloading_size={offloaded}"]
    return [] if transfer is None else [f"kv_connector={transfer.kv_connector}"]


def _refuse_predictor(settings: HybridSparseConfig, vllm_config: Any) -> None:
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        size = vllm_config.parallel_config.tensor_parallel_size
        _refuse("tensor_parallel_size", size, "policy fluxion needs all heads of a layer in one process")
    assert settings.prediction is not None
    choose_predictor(settings.prediction, model_shape(vllm_config), settings.retained)


def model_shape(vllm_config: Any) -> ModelShape:
    """The shape that a predictor is tied to, from vLLM's configuration without tensor parallelism."""
    model = vllm_config.model_config
    return ModelShape(
        layers=model.get_total_num_hidden_layers(),
        query_heads=model.get_num_attention_heads(vllm_config.parallel_config),
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
    )


def refuse_layer(selector: Any) -> None:
    """Check what one layer asks of the backend (vLLM's AttentionSelectorConfig). Raises ConfigError."""
    for name, why in (
        ("use_mla", "multi-head latent attention (MLA) is not supported"),
        ("use_sparse", "models with a trained sparse indexer are not supported"),
        ("use_mm_prefix", "bidirectional attention over multimodal prefixes is not supported"),
        (
            "use_per_head_quant_scales",
            "a KV cache with a scale for each head is not supported; one for a whole layer is",
        ),
        ("use_non_causal", "non-causal attention is not supported"),
        ("use_batch_invariant", "batch-invariant execution is not supported"),
        ("use_rswa", "reference sliding-window attention is not supported"),
    ):
        if getattr(selector, name):
            _refuse(name, True, why)
    if selector.attn_type != "decoder":
        _refuse("attn_type", str(selector.attn_type), "only decoder attention is supported")
    if not head_dim_fits(selector.head_size):
        _refuse("head_size", selector.head_size, head_dim_rule())
    if selector.dtype not in DTYPE_NAMES:
        _refuse("dtype", selector.dtype, "must be bfloat16, float16 or float32")
    kv_dtype(selector.kv_cache_dtype, selector.dtype)


def kv_dtype(kv_cache_dtype: str | None, model_dtype: torch.dtype) -> torch.dtype:
    """The KV cache's dtype: the model's own, one half as wide if that is float32, or FP8. Raises ConfigError."""
    if kv_cache_dtype in (None, "auto"):
        return model_dtype
    stored = KV_CACHE_DTYPES.get(str(kv_cache_dtype))
    if stored is None or (stored != FP8 and model_dtype not in (stored, torch.float32)):
        own = "float16" if model_dtype == torch.float16 else "bfloat16"
        rule = "must be the model's own dtype, bfloat16 or float16 of a float32 model, or fp8 (e4m3)"
        _refuse("kv_cache_dtype", kv_cache_dtype, f"{rule}: --kv-cache-dtype {own}")
    return stored


def _refuse(name: str, value: object, rule: str) -> NoReturn:
    raise ConfigError(f"{name}={value}: {rule} (attention backend hybrid_sparse)")
