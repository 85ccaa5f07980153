"""What the plugin has each of vLLM's platforms decide, where the backend is selected and where it is not."""

import logging
import os
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm")

import torch
from vllm import platforms
from vllm.config import get_current_vllm_config_or_none
from vllm.utils import cpu_resource_utils

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue import plugin, support
from vllm_hybrid_sparse.glue.cpu_threads import SPIN_COUNT, SPIN_COUNT_VARIABLE
from vllm_hybrid_sparse.glue.log import log_as_vllm
from vllm_hybrid_sparse.glue.plugin import CPU_WORKER_PATH, CUDA_WORKER_PATH, hook_platform
from vllm_hybrid_sparse.glue.registration import BACKEND_PATH, member
from vllm_hybrid_sparse.glue.scheduler_choice import ASYNC_SCHEDULER_PATH, SCHEDULER_PATH
from vllm_hybrid_sparse.runtime.cores import RESERVED_VARIABLE


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """What a configuration sets for workers is not there for the next test."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def no_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave vLLM's loggers alone."""
    monkeypatch.setattr(plugin, "hook_stat_loggers", lambda: None)


def platform_of(monkeypatch: pytest.MonkeyPatch, *, on_cuda: bool) -> Any:
    """A platform as vLLM's are, hooked and current; what vLLM's own decisions were asked is in `asked`."""

    class Platform:
        asked: list[Any] = []  # noqa: RUF012

        @classmethod
        def get_attn_backend_cls(cls, backend: Any, selector: Any, **_: Any) -> str:
            cls.asked.append(backend)
            if getattr(selector, "refused", False):
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


def config_of(backend: Any, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "attention_config": SimpleNamespace(backend=backend, backend_per_kind={}),
        "parallel_config": SimpleNamespace(worker_cls="auto", enable_dbo=False, world_size_across_dp=1),
        "scheduler_config": SimpleNamespace(async_scheduling=True, scheduler_cls=None),
        "additional_config": {},
        "cache_config": None,
        "speculative_config": None,
        "model_config": None,
        "kv_transfer_config": None,
    }
    return SimpleNamespace(**(given | changes))


SELECTOR: dict[str, Any] = {
    "attn_type": "decoder",
    "head_size": 64,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
}


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(("on_cuda", "path"), [(True, CUDA_WORKER_PATH), (False, CPU_WORKER_PATH)])
def test_each_platform_gets_its_worker(on_cuda: bool, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform, config = platform_of(monkeypatch, on_cuda=on_cuda), config_of(member())
    platform.check_and_update_config(config)
    platform.check_and_update_config(config)  # as in the engine's process
    assert config.parallel_config.worker_cls == path
    assert config.scheduler_config.async_scheduling
    assert config.scheduler_config.scheduler_cls == (ASYNC_SCHEDULER_PATH if on_cuda else None)
    assert platform.asked == [config, config]


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(
    ("settings", "ahead"), [({}, True), ({"device_ranking": "host"}, False), ({"policy": "hgca"}, False)]
)
def test_steps_are_launched_ahead_where_the_host_has_no_part_in_them(
    settings: dict[str, Any], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(member(), additional_config={"hybrid_sparse": settings})
    platform_of(monkeypatch, on_cuda=True).check_and_update_config(config)
    assert config.scheduler_config.async_scheduling is ahead
    assert config.scheduler_config.scheduler_cls == (ASYNC_SCHEDULER_PATH if ahead else SCHEDULER_PATH)


@pytest.mark.parametrize("on_cuda", [True, False])
def test_nothing_changes_where_another_backend_is_selected(on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    platform, config = platform_of(monkeypatch, on_cuda=on_cuda), config_of(None)
    platform.check_and_update_config(config)
    assert config.parallel_config.worker_cls == "auto"
    assert config.scheduler_config.async_scheduling
    assert platform.get_attn_backend_cls(None, SimpleNamespace()) == "vllm's"


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(
    ("on_cuda", "ours", "given", "spins"),
    [
        (False, True, {}, SPIN_COUNT),
        (False, True, {SPIN_COUNT_VARIABLE: "70"}, "70"),
        (False, True, {"OMP_WAIT_POLICY": "active"}, None),
        (False, False, {}, None),
        (True, True, {}, None),
    ],
)
def test_threads_of_workers_on_a_cpu_wait_shortly_unless_the_user_says_otherwise(
    on_cuda: bool, ours: bool, given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (SPIN_COUNT_VARIABLE, "OMP_WAIT_POLICY"):
        os.environ.pop(name, None)
    os.environ.update(given)
    platform_of(monkeypatch, on_cuda=on_cuda).check_and_update_config(config_of(member() if ours else None))
    assert os.environ.get(SPIN_COUNT_VARIABLE) == spins


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(
    ("cores", "workers", "given", "reserved"),
    [
        ([0, 1], 1, {}, "0"),
        ([0, 0, 1, 1], 1, {}, "0"),
        ([0, 0], 1, {}, None),
        ([0, 1, 2], 1, {}, None),
        ([0, 1], 2, {}, None),
        ([0, 1], 1, {RESERVED_VARIABLE: "1"}, "1"),
        ([0, 1], 1, {"VLLM_CPU_OMP_THREADS_BIND": "auto"}, "0"),
        ([0, 1], 1, {"VLLM_CPU_OMP_THREADS_BIND": "0"}, None),
    ],
)
def test_no_core_of_two_is_kept_from_a_lone_worker_unless_the_user_says_otherwise(
    cores: list[int], workers: int, given: dict[str, str], reserved: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cores` has the physical core of each hardware thread."""
    for name in (RESERVED_VARIABLE, "VLLM_CPU_OMP_THREADS_BIND"):
        os.environ.pop(name, None)
    os.environ.update(given)
    cpus = [SimpleNamespace(id=number, physical_core=core, numa_node=0) for number, core in enumerate(cores)]
    monkeypatch.setattr(cpu_resource_utils, "get_allowed_cpu_list", lambda: cpus)
    config = config_of(
        member(),
        parallel_config=SimpleNamespace(worker_cls="auto", enable_dbo=False, world_size_across_dp=workers),
    )
    platform_of(monkeypatch, on_cuda=False).check_and_update_config(config)
    assert os.environ.get(RESERVED_VARIABLE) == reserved


@pytest.mark.usefixtures("no_loggers")
def test_a_worker_that_the_user_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = platform_of(monkeypatch, on_cuda=True)
    config = config_of(member(), parallel_config=SimpleNamespace(worker_cls="theirs", enable_dbo=False))
    platform.check_and_update_config(config)
    assert config.parallel_config.worker_cls == "theirs"


@pytest.mark.usefixtures("no_loggers")
def test_a_device_that_cuda_does_not_take_is_refused_before_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = platform_of(monkeypatch, on_cuda=True)
    config = config_of(member(), additional_config={"hybrid_sparse": {"device": "emulated"}})
    with pytest.raises(ConfigError, match=r"hybrid_sparse\.device='emulated'"):
        platform.check_and_update_config(config)
    assert platform.asked == []


def test_a_backend_for_some_kinds_of_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = platform_of(monkeypatch, on_cuda=False)
    chosen = SimpleNamespace(backend=None, backend_per_kind={"full_attention": member()})
    with pytest.raises(ConfigError, match=r"attention_config\.backend_per_kind: hybrid_sparse serves all layers"):
        platform.check_and_update_config(config_of(None, attention_config=chosen))


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
            {"connectors": [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "NixlConnector"}]},
        ),
    ],
)
def test_nixl_is_refused_wherever_it_stands(
    connector: str, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
    with pytest.raises(ConfigError, match=r"kv_connector=Nixl\w*: NIXL is not supported"):
        platform_of(monkeypatch, on_cuda=False).check_and_update_config(
            config_of(member(), kv_transfer_config=transfer)
        )


@pytest.mark.usefixtures("no_loggers")
def test_offloading_is_refused_where_the_cache_is_in_host_memory_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SimpleNamespace(cache_dtype="auto", block_size=None, kv_offloading_size=4.0)
    with pytest.raises(ConfigError, match=r"kv_offloading_size=4.0: must not be given on cuda"):
        platform_of(monkeypatch, on_cuda=True).check_and_update_config(config_of(member(), cache_config=cache))
    platform_of(monkeypatch, on_cuda=False).check_and_update_config(config_of(member(), cache_config=cache))


@pytest.mark.usefixtures("no_loggers")
def test_a_checkpoint_with_a_quantised_cache_is_told_how_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(
        member(),
        cache_config=SimpleNamespace(cache_dtype="fp8_e5m2", block_size=None),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
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
        cache_config=SimpleNamespace(cache_dtype="bfloat16", block_size=None),
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
            cache_config=SimpleNamespace(cache_dtype="fp8", block_size=None),
            model_config=model_of(),
            additional_config={"hybrid_sparse": {"policy": policy, **settings}},
        )
        platform_of(monkeypatch, on_cuda=False).check_and_update_config(config)

    check()
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8: is not supported with device=emulated"):
        check(device="emulated")


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
    """On a CPU vLLM itself does not ask."""
    value = LAYER_REFUSALS[name]
    selector = SimpleNamespace(**(SELECTOR | {name: value}))
    with pytest.raises(ConfigError, match=rf"^{name}={value}: .*\(attention backend hybrid_sparse\)"):
        platform_of(monkeypatch, on_cuda=on_cuda).get_attn_backend_cls(member(), selector)
    assert platform_of(monkeypatch, on_cuda=on_cuda).get_attn_backend_cls(None, selector) == "vllm's"


def model_of(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "model": "some/model",
        "dtype": torch.bfloat16,
        "use_mla": False,
        "is_encoder_decoder": False,
        "is_hybrid": False,
        "get_sliding_window": lambda: None,
        "get_head_size": lambda: 64,
        "hf_text_config": SimpleNamespace(),
    }
    return SimpleNamespace(**(given | changes))


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_mla": True}, "model=some/model: multi-head latent attention"),
        ({"is_encoder_decoder": True}, "model=some/model: encoder-decoder models"),
        ({"dtype": torch.float64}, "dtype=torch.float64: must be bfloat16"),
        ({"get_head_size": lambda: 40}, "head_size=40: must be a multiple of 16"),
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


CONNECTED = SimpleNamespace(kv_connector="SharedStorageConnector", kv_connector_extra_config=None)


BEYOND_PAGE_POLICIES: list[tuple[dict[str, Any], str]] = [
    ({"additional_config": {"hybrid_sparse": {"policy": "hgca"}}}, "policy=hgca"),
    ({"additional_config": {"hybrid_sparse": {"policy": "fluxion"}}}, "policy=fluxion"),
    ({"additional_config": {"hybrid_sparse": {"device": "emulated"}}}, "device=emulated"),
    ({"kv_transfer_config": CONNECTED}, "kv_connector=SharedStorageConnector"),
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
    drafting = {"speculative_config": SimpleNamespace(method="ngram"), "model_config": model_of()}
    for settings in ({}, {"policy": "dense"}, {"policy": "topk"}):
        served = config_of(member(), **drafting, additional_config={"hybrid_sparse": settings})
        platform.check_and_update_config(served)
    said = f"=ngram: speculative decoding is not supported with {what}" if what else "=eagle3: only ngram is supported"
    with pytest.raises(ConfigError, match=f"speculative_config.method{said}"):
        platform.check_and_update_config(config_of(member(), **(drafting | changes)))


def test_blocks_are_sized_with_our_configuration_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours says there how large a summary is; of other backends vLLM asks without."""
    platform = platform_of(monkeypatch, on_cuda=False)
    ours = config_of(member())
    platform.update_block_size_for_backend(ours)
    platform.update_block_size_for_backend(config_of(None))
    assert platform.asked == [ours, None]


@pytest.mark.parametrize("given", [{"policy": "hgca"}, {"policy": "fluxion"}, {"device": "emulated"}])
def test_beside_learned_sinks_some_settings_are_refused(given: dict[str, str]) -> None:
    for served in ({}, {"policy": "dense"}, {"policy": "topk"}):
        support.refuse_sinks(HybridSparseConfig.from_mapping(served))
    ((name, value),) = given.items()
    with pytest.raises(
        ConfigError, match=f"has_sink=True: learned attention sinks are not supported with {name}={value}"
    ):
        support.refuse_sinks(HybridSparseConfig.from_mapping(given))


@pytest.mark.parametrize(("additional", "said"), [({"hybrid_sparse": {}}, 1), ({"other": {}}, 0), ({}, 0), (None, 0)])
def test_settings_without_the_backend_are_warned_of(
    additional: Any, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm_hybrid_sparse"):
        platform_of(monkeypatch, on_cuda=False).check_and_update_config(config_of(None, additional_config=additional))
    lines = [record.getMessage() for record in caplog.records]
    wanted = "additional_config.hybrid_sparse: without effect, since --attention-backend is not hybrid_sparse"
    assert lines == [wanted] * said


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_a_context_that_is_split_over_workers_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(worker_cls="auto", enable_dbo=False, **{name: 2})
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
    spec: Any = SimpleNamespace(non_causal=True)
    with pytest.raises(ConfigError, match="non_causal=True: prefix-LM prompts are not supported"):
        HybridSparseBackend.customize_spec(spec)


def test_on_cuda_vllm_asks_the_backend_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = platform_of(monkeypatch, on_cuda=True)
    assert platform.get_attn_backend_cls(member(), SimpleNamespace(**SELECTOR)) == BACKEND_PATH
    assert platform.asked == [member()]
    with pytest.raises(ValueError, match="compute capability not supported"):
        platform.get_attn_backend_cls(member(), SimpleNamespace(**SELECTOR, refused=True))
    on_cpu = platform_of(monkeypatch, on_cuda=False)
    assert on_cpu.get_attn_backend_cls(member(), SimpleNamespace(**SELECTOR)) == BACKEND_PATH
    assert on_cpu.asked == []


def test_warnings_of_ours_appear_in_vllm_s_log(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = logging.getLogger("vllm_hybrid_sparse"), logging.getLogger("vllm")
    monkeypatch.setattr(ours, "handlers", [])
    handler = BufferingHandler(capacity=10)
    monkeypatch.setattr(theirs, "handlers", [handler])
    for _ in range(2):
        log_as_vllm()
    logging.getLogger("vllm_hybrid_sparse.runtime.tiers").warning("a load failed")
    assert [record.getMessage() for record in handler.buffer] == ["a load failed"]
