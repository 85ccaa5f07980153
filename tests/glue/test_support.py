"""What is refused at start-up. Each refusal names what it refuses, its value and the reason."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from benchmarks.serving.backends import FILLING_CONNECTOR
from tests.glue.fake_config import SELECTOR, cache_of, config_of, model_of, parallel_of, platform_of
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue import support
from vllm_hybrid_sparse.glue.registration import member

CONNECTED = SimpleNamespace(
    kv_connector="SharedStorageConnector", kv_connector_module_path=None, kv_connector_extra_config=None
)
DRAFTING = SimpleNamespace(method="ngram", num_speculative_tokens=2)


@pytest.mark.parametrize(
    ("fake", "real"),
    [
        (config_of(None), VllmConfig),
        (cache_of(), CacheConfig),
        (parallel_of(), ParallelConfig),
        (model_of(), ModelConfig),
        (CONNECTED, KVTransferConfig),
        (DRAFTING, SpeculativeConfig),
    ],
)
def test_what_is_read_has_vllms_names(fake: Any, real: Any) -> None:
    """The fakes have every name that a refusal reads, so a name that vLLM drops fails here."""
    assert vars(fake).keys() <= {entry.name for entry in fields(real)}.union(dir(real))


@pytest.mark.usefixtures("no_loggers")
def test_the_newer_model_runner_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(member(), use_v2_model_runner=True)
    with pytest.raises(ConfigError, match=r"VLLM_USE_V2_MODEL_RUNNER=1 .*: must be 0 without a GPU"):
        platform_of(monkeypatch, on_cuda=False).check_and_update_config(config)
    platform_of(monkeypatch, on_cuda=True).check_and_update_config(config)


@pytest.mark.usefixtures("no_loggers")
def test_watermarks_need_the_newer_model_runner_whatever_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(member(), use_v2_model_runner=True, watermark_config="green")
    with pytest.raises(ConfigError, match=r"watermark_config=green: .* not supported without a GPU"):
        platform_of(monkeypatch, on_cuda=False).check_and_update_config(config)


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(
    ("connector", "extra"),
    [
        ("NixlConnector", {}),
        ("NixlPushConnector", {}),
        (
            "MultiConnector",
            {"connectors": [{"kv_connector": "ExampleConnector"}, {"kv_connector": "NixlConnector"}]},
        ),
    ],
)
def test_nixl_is_refused_wherever_it_stands(
    connector: str, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra)
    with pytest.raises(ConfigError, match=r"kv_connector=Nixl\w*: NIXL is not supported"):
        platform_of(monkeypatch, on_cuda=False).check_and_update_config(
            config_of(member(), kv_transfer_config=transfer)
        )


@pytest.mark.usefixtures("no_loggers")
def test_a_checkpoint_with_a_quantised_cache_is_told_how_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(
        member(),
        cache_config=cache_of(cache_dtype="fp8_e5m2"),
        model_config=model_of(),
    )
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8_e5m2: .* --kv-cache-dtype bfloat16"):
        platform_of(monkeypatch, on_cuda=False).check_and_update_config(config)


@pytest.mark.parametrize(
    ("model", "given", "stored"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, None, torch.float32),
        (torch.float16, "float16", torch.float16),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float32, "float16", torch.float16),
        (torch.float32, "fp8", torch.float8_e4m3fn),
        (torch.bfloat16, "fp8_e4m3", torch.float8_e4m3fn),
        (torch.float16, "fp8", torch.float8_e4m3fn),
    ],
)
def test_a_cache_may_be_narrower_than_the_model(model: torch.dtype, given: str | None, stored: torch.dtype) -> None:
    assert support.kv_dtype(given, model) == stored


@pytest.mark.parametrize(("model", "given"), [(torch.bfloat16, "float16"), (torch.float16, "bfloat16")])
def test_a_cache_that_cannot_hold_what_the_model_computes_is_refused(model: torch.dtype, given: str) -> None:
    own = str(model).removeprefix("torch.")
    with pytest.raises(ConfigError, match=rf"^kv_cache_dtype={given}: .* --kv-cache-dtype {own}"):
        support.kv_dtype(given, model)


@pytest.mark.usefixtures("no_loggers")
def test_a_narrower_cache_is_refused_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(
        member(),
        cache_config=cache_of(cache_dtype="bfloat16"),
        model_config=model_of(dtype=torch.float32),
    )
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=bfloat16: must be the model's own dtype on cuda"):
        platform_of(monkeypatch, on_cuda=True).check_and_update_config(config)
    platform_of(monkeypatch, on_cuda=False).check_and_update_config(config)


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize("policy", ["dense", "hgca"])
def test_a_cache_of_eight_bits_is_refused_beside_a_device(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(**settings: object) -> None:
        config = config_of(
            member(),
            cache_config=cache_of(cache_dtype="fp8"),
            model_config=model_of(),
            additional_config={"hybrid_sparse": {"policy": policy, **settings}},
        )
        platform_of(monkeypatch, on_cuda=False).check_and_update_config(config)

    check()
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8: is not supported with device=emulated"):
        check(device="emulated")


@pytest.mark.usefixtures("no_loggers")
def test_fluxion_is_refused_where_heads_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(
        member(),
        parallel_config=parallel_of(tensor_parallel_size=2),
        model_config=model_of(),
        additional_config={"hybrid_sparse": {"policy": "fluxion"}},
    )
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: policy fluxion needs all heads of a layer"):
        platform_of(monkeypatch, on_cuda=False).check_and_update_config(config)


LAYER_REFUSALS = {
    "use_mla": True, "use_sparse": True, "use_mm_prefix": True, "use_per_head_quant_scales": True,
    "use_non_causal": True, "use_batch_invariant": True, "use_rswa": True,
    "attn_type": "encoder", "head_size": 20, "dtype": torch.float64, "kv_cache_dtype": "fp8_e5m2",
}  # fmt: skip


@pytest.mark.parametrize("name", LAYER_REFUSALS)
@pytest.mark.parametrize("on_cuda", [True, False])
def test_a_layer_that_asks_for_what_is_not_served_is_refused(
    name: str, on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, vLLM itself does not ask the backend."""
    value = LAYER_REFUSALS[name]
    selector = SELECTOR._replace(**{name: value})
    with pytest.raises(ConfigError, match=rf"^{name}={value}: .*\(attention backend hybrid_sparse\)"):
        platform_of(monkeypatch, on_cuda=on_cuda).get_attn_backend_cls(member(), selector)
    assert platform_of(monkeypatch, on_cuda=on_cuda).get_attn_backend_cls(None, selector) == "vllm's"


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"is_attention_free": True, "get_head_size": lambda: 0}, "model=some/model: models without attention layers"),
        ({"use_mla": True}, "model=some/model: multi-head latent attention"),
        ({"is_encoder_decoder": True}, "model=some/model: encoder-decoder models"),
        ({"dtype": torch.float64}, "dtype=torch.float64: must be bfloat16"),
        ({"get_head_size": lambda: 40}, "head_size=40: must be a multiple of 16"),
        (
            {"is_mm_prefix_lm": True},
            "model=some/model: bidirectional attention .* is not supported; --language-model-only serves its text",
        ),
        ({"hf_text_config": SimpleNamespace(attn_logit_softcapping=50.0)}, "attn_logit_softcapping=50.0: soft-capped"),
        ({"hf_text_config": SimpleNamespace(attention_chunk_size=8192)}, "attention_chunk_size=8192: chunked local"),
        ({"hf_text_config": SimpleNamespace(alibi=True)}, "alibi=True: ALiBi"),
        ({"hf_text_config": SimpleNamespace(model_type="bloom")}, "alibi=True: ALiBi"),
    ],
)
def test_a_model_that_is_not_served_is_refused(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = platform_of(monkeypatch, on_cuda=False)
    platform.check_and_update_config(config_of(member(), model_config=model_of()))
    with pytest.raises(ConfigError, match=said):
        platform.check_and_update_config(config_of(member(), model_config=model_of(**changes)))


BEYOND_PAGE_POLICIES: list[tuple[dict[str, Any], str]] = [
    ({"additional_config": {"hybrid_sparse": {"policy": "hgca"}}}, "policy=hgca"),
    ({"additional_config": {"hybrid_sparse": {"policy": "fluxion"}}}, "policy=fluxion"),
    ({"additional_config": {"hybrid_sparse": {"device": "emulated"}}}, "device=emulated"),
    ({"kv_transfer_config": CONNECTED}, "kv_connector=SharedStorageConnector"),
    ({"cache_config": cache_of(kv_offloading_size=4.0, kv_offloading_backend="lmcache")}, "kv_offloading_size=4.0"),
]


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(("changes", "what"), BEYOND_PAGE_POLICIES)
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"get_sliding_window": lambda: 4096}, "sliding_window=4096: is not supported with {}; --disable-sliding-w"),
        ({"is_hybrid": True}, "model=some/model: layers that keep a state are not supported with {}"),
    ],
)
def test_beside_other_kinds_of_layers_some_settings_are_refused(
    model: dict[str, Any], said: str, changes: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = platform_of(monkeypatch, on_cuda=False)
    mixed = model_of(**model)
    for settings in ({}, {"policy": "dense"}, {"policy": "topk"}):
        served = config_of(member(), model_config=mixed, additional_config={"hybrid_sparse": settings})
        platform.check_and_update_config(served)
    with pytest.raises(ConfigError, match=said.format(what)):
        platform.check_and_update_config(config_of(member(), model_config=mixed, **changes))


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(("changes", "what"), BEYOND_PAGE_POLICIES[:1] + BEYOND_PAGE_POLICIES[2:])
def test_a_window_that_no_request_is_too_long_for_is_none(
    changes: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = platform_of(monkeypatch, on_cuda=False)
    model = model_of(max_model_len=4096, get_sliding_window=lambda: 4096, get_num_layers=lambda _parallel: 2)
    platform.check_and_update_config(config_of(member(), model_config=model, **changes))
    model.get_sliding_window = lambda: 4095
    with pytest.raises(ConfigError, match=f"sliding_window=4095: is not supported with {what}"):
        platform.check_and_update_config(config_of(member(), model_config=model, **changes))


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        *BEYOND_PAGE_POLICIES,
        ({"model_config": model_of(is_hybrid=True)}, "layers that keep a state"),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, None),
    ],
)
def test_drafts_come_from_the_text_and_beside_page_policies(
    changes: dict[str, Any], what: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = platform_of(monkeypatch, on_cuda=False)
    drafting = {"speculative_config": DRAFTING, "model_config": model_of()}
    for settings in ({}, {"policy": "dense"}, {"policy": "topk"}):
        served = config_of(member(), **drafting, additional_config={"hybrid_sparse": settings})
        platform.check_and_update_config(served)
    said = f"=ngram: speculative decoding is not supported with {what}" if what else "=eagle3: only ngram is supported"
    with pytest.raises(ConfigError, match=f"speculative_config.method{said}"):
        platform.check_and_update_config(config_of(member(), **(drafting | changes)))


@pytest.mark.parametrize("given", [{"policy": "hgca"}, {"policy": "fluxion"}, {"device": "emulated"}])
def test_beside_learned_sinks_some_settings_are_refused(given: dict[str, str]) -> None:
    for served in ({}, {"policy": "dense"}, {"policy": "topk"}):
        support.refuse_sinks(HybridSparseConfig.from_mapping(served))
    ((name, value),) = given.items()
    with pytest.raises(
        ConfigError, match=f"has_sink=True: learned attention sinks are not supported with {name}={value}"
    ):
        support.refuse_sinks(HybridSparseConfig.from_mapping(given))


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_a_context_that_is_split_over_workers_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = parallel_of(**{name: 2})
    with pytest.raises(ConfigError, match=f"{name}=2: context parallelism is not supported"):
        platform_of(monkeypatch, on_cuda=False).check_and_update_config(config_of(member(), parallel_config=parallel))


@pytest.mark.usefixtures("no_loggers")
def test_an_instruction_set_that_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "supported_isas", lambda: ["avx2", "scalar"])
    config = config_of(member(), additional_config={"hybrid_sparse": {"isa": "avx512"}})
    with pytest.raises(ConfigError, match=r"hybrid_sparse.isa='avx512': this machine runs avx2, scalar"):
        platform_of(monkeypatch, on_cuda=False).check_and_update_config(config)


def test_a_layer_whose_prompts_are_not_causal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_hybrid_sparse.glue.backend import HybridSparseBackend  # noqa: PLC0415

    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config_of(member()))
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32, non_causal=True)
    with pytest.raises(ConfigError, match="non_causal=True: prefix-LM prompts are not supported"):
        HybridSparseBackend.customize_spec(spec)


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize("on_cuda", [True, False])
def test_prompts_that_some_layers_skip_are_refused(on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(member(), cache_config=cache_of(kv_sharing_fast_prefill=True))
    with pytest.raises(ConfigError, match=r"kv_sharing_fast_prefill=True: .* not supported"):
        platform_of(monkeypatch, on_cuda=on_cuda).check_and_update_config(config)


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_transfer_config": CONNECTED}, "kv_connector=SharedStorageConnector"),
        (
            {"cache_config": cache_of(kv_offloading_size=4.0, kv_offloading_backend="lmcache")},
            "kv_offloading_size=4.0: must not be given",
        ),
        ({"parallel_config": parallel_of(enable_elastic_ep=True)}, "enable_elastic_ep=True: .* are not supported"),
        (
            {"parallel_config": parallel_of(enable_dbo=True, use_ubatching=True)},
            "enable_dbo=True: steps in two or more",
        ),
        ({"model_config": model_of(get_head_size=lambda: 512)}, "head_size=512: must be at most 256"),
        (
            {
                "model_config": model_of(
                    dtype=torch.float32, get_head_size=lambda: 256, get_num_attention_heads=lambda _parallel: 66
                )
            },
            "dtype=torch.float32: with 33 query heads to a KV head of 256 is not supported",
        ),
        ({"model_config": model_of(enable_sleep_mode=True)}, "enable_sleep_mode=True: .* is not supported"),
    ],
)
def test_what_a_gpu_does_not_serve_is_refused(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cuda, on_cpu = platform_of(monkeypatch, on_cuda=True), platform_of(monkeypatch, on_cuda=False)
    on_cpu.check_and_update_config(config_of(member(), **changes))
    platform_of(monkeypatch, on_cuda=True)
    filled = SimpleNamespace(**FILLING_CONNECTOR)  # as `benchmarks.gpu_timing` uses it
    on_cuda.check_and_update_config(config_of(member(), model_config=model_of(), kv_transfer_config=filled))
    with pytest.raises(ConfigError, match=f"^{said}.* on cuda"):
        on_cuda.check_and_update_config(config_of(member(), **changes))


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize("on_cuda", [True, False])
def test_steps_in_microbatches_are_refused(on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU too: there vLLM turns off enable_dbo, but not this."""
    config = config_of(member(), parallel_config=parallel_of(ubatch_size=2, use_ubatching=True))
    where = "on cuda" if on_cuda else "without a GPU"
    with pytest.raises(ConfigError, match=f"^ubatch_size=2: steps in two or more microbatches are not .* {where}"):
        platform_of(monkeypatch, on_cuda=on_cuda).check_and_update_config(config)


@pytest.mark.usefixtures("no_loggers")
def test_a_rank_that_is_started_by_itself_needs_a_size_of_its_host_store(monkeypatch: pytest.MonkeyPatch) -> None:
    sized = cache_of(kv_cache_memory_bytes=2**30)
    on_cuda = platform_of(monkeypatch, on_cuda=True)
    for given, said in (
        ({"data_parallel_external_lb": True}, "data_parallel_external_lb=True"),
        ({"data_parallel_size": 2, "data_parallel_rank_local": 0}, "data_parallel_rank_local=0"),
    ):
        with pytest.raises(ConfigError, match=f"^{said}: needs --kv-cache-memory-bytes on cuda"):
            on_cuda.check_and_update_config(config_of(member(), parallel_config=parallel_of(**given)))
        on_cuda.check_and_update_config(config_of(member(), parallel_config=parallel_of(**given), cache_config=sized))


@pytest.mark.usefixtures("no_loggers")
def test_ranks_of_one_server_know_how_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gives each its local rank before it checks the configuration once more, in the process of an engine."""
    config = config_of(member(), parallel_config=parallel_of(data_parallel_size=2, data_parallel_size_local=2))
    on_cuda = platform_of(monkeypatch, on_cuda=True)
    on_cuda.check_and_update_config(config)
    config.parallel_config.data_parallel_rank_local = 1
    on_cuda.check_and_update_config(config)


@pytest.mark.usefixtures("no_loggers")
def test_offloading_to_host_memory_is_refused_where_the_cache_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = platform_of(monkeypatch, on_cuda=False)
    with pytest.raises(ConfigError, match=r"^kv_offloading_size=4\.0: must not be given without a GPU"):
        on_cpu.check_and_update_config(config_of(member(), cache_config=cache_of(kv_offloading_size=4.0)))


def test_eight_bits_are_told_from_their_scales() -> None:
    with pytest.raises(ConfigError, match=r"a KV cache with a scale for each head is not supported"):
        support.refuse_layer(SELECTOR._replace(kv_cache_dtype="fp8", use_per_head_quant_scales=True))
    support.refuse_layer(SELECTOR._replace(kv_cache_dtype="fp8"))
