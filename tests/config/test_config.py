"""Settings are typed, ranged and used, or refused with name, value and rule."""

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.settings import settings_table
from vllm_hybrid_sparse.values import PageRanking, PredictionSpec, RetainedSet, SalienceSpec, SelectionSpec

NAMES = [entry.name for entry in fields(HybridSparseConfig)]


def refusal_of(mapping: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        HybridSparseConfig.from_mapping(mapping)
    return str(caught.value)


def test_nothing_given_is_progressive_with_the_documented_defaults() -> None:
    assert HybridSparseConfig.from_mapping({}) == HybridSparseConfig()
    assert HybridSparseConfig().describe() == (
        "policy=progressive threshold=0.95 microbatch_pages=16 remainder=estimated summary=key_codes code_bits=2 "
        "unread_attributed=0.5 sink_tokens=64 window_tokens=256 "
        "isa=auto num_threads=0 thread_pool=auto device=none log_interval_s=60.0"
    )


@pytest.mark.parametrize(
    ("mapping", "spec"),
    [
        ({"policy": "dense"}, SelectionSpec()),
        ({"policy": "topk"}, SelectionSpec(ranked=True, budget_ratio=0.05, attributed=0.5)),
        ({"policy": "topk", "topk_ratio": 0.2}, SelectionSpec(ranked=True, budget_ratio=0.2, attributed=0.5)),
        ({"policy": "topk", "topk_pages": 12}, SelectionSpec(ranked=True, max_pages=12, attributed=0.5)),
        (
            {"policy": "topk", "topk_pages": 12, "prefix_sharers": 2},
            SelectionSpec(ranked=True, max_pages=12, attributed=0.5, prefix_sharers=2),
        ),
        ({"policy": "topk", "unread_attributed": "0"}, SelectionSpec(ranked=True, budget_ratio=0.05)),
        (
            {"policy": "topk", "unread_attributed": 1, "code_bits": 1},
            SelectionSpec(ranked=True, budget_ratio=0.05, attributed=1.0),
        ),
        ({"policy": "topk", "summary": "cuboid_mean"}, SelectionSpec(ranked=True, budget_ratio=0.05)),
        (
            {"policy": "progressive"},
            SelectionSpec(ranked=True, threshold=0.95, microbatch_pages=16, estimated_remainder=True, attributed=0.5),
        ),
        (
            {"policy": "progressive", "remainder": "lightest_page"},
            SelectionSpec(ranked=True, threshold=0.95, microbatch_pages=16, attributed=0.5),
        ),
        (
            {"policy": "progressive", "summary": "minmax"},
            SelectionSpec(ranked=True, threshold=0.95, microbatch_pages=16),
        ),
        (
            {"policy": "progressive", "summary": "minmax", "prefix_sharers": 0},
            SelectionSpec(ranked=True, threshold=0.95, microbatch_pages=16, prefix_sharers=0),
        ),
        (
            {"policy": "progressive", "threshold": 1, "microbatch_pages": 1},
            SelectionSpec(ranked=True, threshold=1.0, microbatch_pages=1, estimated_remainder=True, attributed=0.5),
        ),
    ],
)
def test_each_policy_is_one_selection(mapping: dict[str, Any], spec: SelectionSpec) -> None:
    assert HybridSparseConfig.from_mapping(mapping).selection == spec


def test_the_retained_set_is_that_of_the_settings() -> None:
    config = HybridSparseConfig(sink_tokens=0, window_tokens=16)
    assert config.retained == RetainedSet(sink_tokens=0, window_tokens=16)


def test_dense_keeps_the_summary_that_is_asked_for_and_else_none() -> None:
    config = HybridSparseConfig(policy="dense")
    assert (config.summary, config.page_summary, config.code_bits) == (None, "none", None)
    for device in ("none", "emulated", "cuda"):
        asked = HybridSparseConfig(policy="dense", summary="key_codes", device=device)
        assert (asked.page_summary, asked.code_bits) == ("key_codes", 2)
    message = refusal_of({"policy": "dense", "code_bits": 1})
    assert message == "hybrid_sparse.code_bits=1: used by summary key_codes only, and the summary is none"


def test_hgca_judges_tokens_and_keeps_no_summary() -> None:
    config = HybridSparseConfig.from_mapping({"policy": "hgca"})
    assert config.salience == SalienceSpec(beta=1.0, alpha=0.1)
    assert config.selection == SelectionSpec()
    assert (config.summary, config.code_bits) == (None, None)
    given = HybridSparseConfig.from_mapping({"policy": "hgca", "hgca_beta": "0.25", "hgca_alpha": 1})
    assert given.salience == SalienceSpec(beta=0.25, alpha=1.0)
    assert HybridSparseConfig(policy="topk").salience is None
    assert HybridSparseConfig(policy="topk").summary == "key_codes"
    assert refusal_of({"policy": "hgca", "summary": "minmax"}) == (
        "hybrid_sparse.summary='minmax': used by policy dense and topk and progressive and fluxion only, "
        "and the policy is hgca"
    )


def test_fluxion_asks_its_predictor_and_ranks_by_what_that_was_trained_with() -> None:
    config = HybridSparseConfig.from_mapping({"policy": "fluxion"})
    assert config.prediction == PredictionSpec(
        predictor=None,
        granularity=0,
        dense_tokens=2048,
        ranking=PageRanking(summary="key_codes", code_bits=2),
    )
    assert config.selection == SelectionSpec(attributed=0.5)
    assert (config.summary, config.code_bits) == ("key_codes", 2)
    given = HybridSparseConfig.from_mapping(
        {
            "policy": "fluxion",
            "predictor": "a.safetensors",
            "granularity": "32",
            "dense_tokens": "0",
            "summary": "minmax",
        }
    )
    bounds = PageRanking(summary="minmax", code_bits=None)
    assert given.prediction == PredictionSpec(predictor="a.safetensors", granularity=32, dense_tokens=0, ranking=bounds)
    assert HybridSparseConfig(policy="topk").prediction is None
    assert refusal_of({"policy": "fluxion", "summary": "cuboid_mean"}) == (
        "hybrid_sparse.summary='cuboid_mean': must be key_codes or minmax with policy fluxion"
    )


def test_numbers_may_come_as_text_from_the_command_line() -> None:
    as_text = {
        "policy": "progressive",
        "threshold": "0.9",
        "microbatch_pages": "16",
        "sink_tokens": "0",
        "window_tokens": " 512 ",
        "isa": "avx2",
    }
    as_json = {
        "policy": "progressive",
        "threshold": 0.9,
        "microbatch_pages": 16,
        "sink_tokens": 0,
        "window_tokens": 512,
        "isa": "avx2",
    }
    assert HybridSparseConfig.from_mapping(as_text) == HybridSparseConfig.from_mapping(as_json)


def test_a_whole_number_is_a_number() -> None:
    config = HybridSparseConfig.from_mapping({"policy": "progressive", "threshold": 1, "log_interval_s": 0})
    assert isinstance(config.threshold, float)
    assert config.threshold == 1.0
    assert isinstance(config.log_interval_s, float)


def test_null_means_not_given() -> None:
    assert HybridSparseConfig.from_mapping(dict.fromkeys(NAMES)) == HybridSparseConfig()


def test_what_key_codes_alone_can_do_is_refused_with_others() -> None:
    message = refusal_of({"policy": "progressive", "summary": "minmax", "remainder": "estimated"})
    assert message == "hybrid_sparse.remainder='estimated': needs summary key_codes, and the summary is minmax"
    message = refusal_of({"summary": "minmax", "code_bits": 1})
    assert message == "hybrid_sparse.code_bits=1: used by summary key_codes only, and the summary is minmax"
    assert "must be one of 1, 2" in refusal_of({"code_bits": 3})
    message = refusal_of({"policy": "topk", "summary": "minmax", "unread_attributed": 0.5})
    assert message == "hybrid_sparse.unread_attributed=0.5: used by summary key_codes only, and the summary is minmax"
    message = refusal_of({"policy": "dense", "unread_attributed": 0})
    assert message == (
        "hybrid_sparse.unread_attributed=0.0: used by policy topk and progressive and fluxion only, "
        "and the policy is dense"
    )
    assert "must be 0 to 1" in refusal_of({"unread_attributed": 1.5})


@pytest.mark.parametrize(
    ("mapping", "refusal"),
    [
        ({"policy": "dens"}, "hybrid_sparse.policy='dens': must be one of dense, topk, progressive"),
        ({"policy": 3}, "hybrid_sparse.policy=3: must be text, one of dense, topk, progressive"),
        ({"threshold": 0}, "hybrid_sparse.threshold=0: must be above 0 and at most 1"),
        ({"threshold": "1.5"}, "hybrid_sparse.threshold='1.5': must be above 0 and at most 1"),
        ({"threshold": "high"}, "hybrid_sparse.threshold='high': must be a number, above 0 and at most 1"),
        ({"threshold": True}, "hybrid_sparse.threshold=True: must be a number, above 0 and at most 1"),
        ({"threshold": float("nan")}, "hybrid_sparse.threshold=nan: must be above 0 and at most 1"),
        ({"microbatch_pages": 0}, "hybrid_sparse.microbatch_pages=0: must be 1 to 1024"),
        ({"prefix_sharers": 1}, "hybrid_sparse.prefix_sharers=1: must be 0, or 2 to 1024"),
        ({"prefix_sharers": 1025}, "hybrid_sparse.prefix_sharers=1025: must be 0, or 2 to 1024"),
        ({"microbatch_pages": 1025}, "hybrid_sparse.microbatch_pages=1025: must be 1 to 1024"),
        ({"policy": "topk", "topk_ratio": 0.0}, "hybrid_sparse.topk_ratio=0.0: must be above 0 and at most 1"),
        ({"policy": "topk", "topk_ratio": 1.1}, "hybrid_sparse.topk_ratio=1.1: must be above 0 and at most 1"),
        ({"policy": "topk", "topk_pages": 0}, "hybrid_sparse.topk_pages=0: must be 1 to 1048576"),
        ({"policy": "topk", "topk_pages": 2**20 + 1}, "hybrid_sparse.topk_pages=1048577: must be 1 to 1048576"),
        ({"policy": "hgca", "hgca_beta": 0}, "hybrid_sparse.hgca_beta=0: must be above 0, finite"),
        ({"policy": "hgca", "hgca_beta": "1e999"}, "hybrid_sparse.hgca_beta='1e999': must be above 0, finite"),
        ({"policy": "hgca", "hgca_alpha": 0}, "hybrid_sparse.hgca_alpha=0: must be above 0 and at most 1"),
        ({"policy": "hgca", "hgca_alpha": 1.01}, "hybrid_sparse.hgca_alpha=1.01: must be above 0 and at most 1"),
        ({"policy": "fluxion", "predictor": ""}, "hybrid_sparse.predictor='': must be the path of a file"),
        (
            {"policy": "fluxion", "predictor": os.fsdecode(b"caf\xe9.safetensors")},
            "hybrid_sparse.predictor='caf\\udce9.safetensors': must be text in UTF-8",
        ),
        ({"policy": "fluxion", "granularity": 8}, "hybrid_sparse.granularity=8: must be one of 0, 16, 32, 64, 128"),
        ({"policy": "fluxion", "dense_tokens": -1}, "hybrid_sparse.dense_tokens=-1: must be 0 to 16777216"),
        ({"policy": "fluxion", "dense_tokens": 2**24 + 1}, "hybrid_sparse.dense_tokens=16777217: must be 0 to 16777"),
        ({"summary": "none"}, "hybrid_sparse.summary='none': must be one of minmax, cuboid_mean, key_codes"),
        ({"summary": "mean"}, "hybrid_sparse.summary='mean': must be one of minmax, cuboid_mean"),
        ({"sink_tokens": -16}, "hybrid_sparse.sink_tokens=-16: must be a multiple of 16, 0 to 16777216"),
        ({"sink_tokens": 20}, "hybrid_sparse.sink_tokens=20: must be a multiple of 16, 0 to 16777216"),
        ({"sink_tokens": 64.0}, "hybrid_sparse.sink_tokens=64.0: must be a whole number, a multiple of 16, "),
        ({"sink_tokens": "6_4"}, "hybrid_sparse.sink_tokens='6_4': must be a whole number, a multiple of 16, "),
        ({"window_tokens": 0}, "hybrid_sparse.window_tokens=0: must be a multiple of 16, 16 to 16777216"),
        ({"window_tokens": False}, "hybrid_sparse.window_tokens=False: must be a whole number, a multiple of 16, "),
        ({"window_tokens": 2**31}, "hybrid_sparse.window_tokens=2147483648: must be a multiple of 16, 16 to "),
        (
            {"isa": "sse"},
            "hybrid_sparse.isa='sse': must be one of auto, amx_bf16, avx512_bf16, avx512_vnni, avx512, avx2, scalar",
        ),
        ({"num_threads": -1}, "hybrid_sparse.num_threads=-1: must be 0 to 1024"),
        ({"num_threads": 1025}, "hybrid_sparse.num_threads=1025: must be 0 to 1024"),
        ({"num_threads": [2]}, "hybrid_sparse.num_threads=[2]: must be a whole number, 0 to 1024"),
        ({"device": "emulated", "admission": "all"}, "hybrid_sparse.admission='all': must be one of working_set, none"),
        ({"device": "gpu"}, "hybrid_sparse.device='gpu': must be one of none, emulated, cuda"),
        (
            {"device": "cuda", "device_pool_pages": 2**31},
            "hybrid_sparse.device_pool_pages=2147483648: must be 1 to 2147483647",
        ),
        (
            {"device": "emulated", "device_resident_share": 1},
            "hybrid_sparse.device_resident_share=1: must be 0 or more, below 1",
        ),
        ({"device": "emulated", "host_share": "some"}, "hybrid_sparse.host_share='some': must be one of none, uniform"),
        ({"log_interval_s": -1}, "hybrid_sparse.log_interval_s=-1: must be 0 or more, finite"),
        ({"log_interval_s": float("inf")}, "hybrid_sparse.log_interval_s=inf: must be 0 or more, finite"),
        ({"log_interval_s": 10**400}, "hybrid_sparse.log_interval_s=1000"),
        ("threshold=0.9", "hybrid_sparse='threshold=0.9': must be a mapping of setting names to values"),
        (None, "hybrid_sparse=None: must be a mapping of setting names to values"),
    ],
)
def test_a_wrong_value_is_refused_with_name_value_and_rule(mapping: Any, refusal: str) -> None:
    assert refusal_of(mapping).startswith(refusal)


@pytest.mark.parametrize(
    ("name", "meant"), [("treshold", "threshold"), ("topk-pages", "topk_pages"), ("Window_Tokens", "window_tokens")]
)
def test_an_unknown_setting_is_refused_with_the_one_that_was_meant(name: str, meant: str) -> None:
    assert refusal_of({name: 1}) == f"hybrid_sparse.{name}=1: no such setting; did you mean {meant}?"


@given(st.one_of(st.text(), st.integers()).filter(lambda name: name not in NAMES))
def test_every_unknown_setting_is_refused(name: Any) -> None:
    assert "no such setting" in refusal_of({name: 1})


@pytest.mark.parametrize(
    ("policy", "name", "value", "users"),
    [
        ("dense", "threshold", 0.95, "progressive"),
        ("topk", "threshold", 0.95, "progressive"),
        ("topk", "microbatch_pages", 8, "progressive"),
        ("dense", "topk_ratio", 0.05, "topk"),
        ("progressive", "topk_pages", 64, "topk"),
        ("topk", "granularity", 16, "fluxion"),
        ("progressive", "dense_tokens", 2048, "fluxion"),
    ],
)
def test_a_setting_without_effect_is_refused_with_the_policy_that_uses_it(
    policy: str, name: str, value: float, users: str
) -> None:
    expected = f"hybrid_sparse.{name}={value}: used by policy {users} only, and the policy is {policy}"
    assert refusal_of({"policy": policy, name: value}) == expected


def test_two_budgets_at_once_are_refused() -> None:
    refusal = refusal_of({"policy": "topk", "topk_ratio": 0.1, "topk_pages": 8})
    assert refusal == "hybrid_sparse.topk_ratio=0.1: give it or topk_pages, not both"


@given(
    st.fixed_dictionaries(
        {"policy": st.just("progressive")},
        optional={
            "threshold": st.floats(0, 1, exclude_min=True),
            "microbatch_pages": st.integers(1, 1024),
            "summary": st.sampled_from(["minmax", "cuboid_mean"]),
            "sink_tokens": st.integers(0, 2**20).map(lambda pages: 16 * pages),
            "window_tokens": st.integers(1, 2**20).map(lambda pages: 16 * pages),
            "num_threads": st.integers(0, 1024),
            "log_interval_s": st.floats(0, 1e9),
        },
    )
)
def test_what_is_described_can_be_given_back_as_text(mapping: dict[str, Any]) -> None:
    config = HybridSparseConfig.from_mapping(mapping)
    as_text = dict(pair.split("=") for pair in config.describe().split(" "))
    assert HybridSparseConfig.from_mapping(as_text) == config


def test_a_device_has_a_pool_and_nothing_else_has() -> None:
    device = HybridSparseConfig(device="emulated")
    assert (device.device_pool_pages, device.device_pool, device.device_eviction, device.host_share) == (
        4096,
        "unified",
        "cyclic",
        "none",
    )
    assert device.admission == "working_set"
    assert HybridSparseConfig().device_pool_pages is None
    assert HybridSparseConfig().admission is None
    for name, value in (("device_pool_pages", 64), ("admission", "none")):
        rule = "used by device emulated and cuda only, and the device is none"
        assert refusal_of({name: value}) == f"hybrid_sparse.{name}={value!r}: {rule}"


@pytest.mark.parametrize(
    ("mapping", "least"),
    [
        ({}, 32),
        ({"microbatch_pages": 5}, 10),
        ({"policy": "dense"}, 16),
        ({"policy": "topk", "topk_pages": 3}, 16),
    ],
)
def test_a_pool_holds_two_microbatches_of_a_group_or_is_refused(mapping: dict[str, Any], least: int) -> None:
    given = {"device": "emulated", **mapping}
    assert HybridSparseConfig.from_mapping({**given, "device_pool_pages": least}).device_pool_pages == least
    refusal = refusal_of({**given, "device_pool_pages": least - 1})
    assert refusal.startswith(f"hybrid_sparse.device_pool_pages={least - 1}: must be at least {least}")


@pytest.mark.parametrize("device", ["emulated", "cuda"])
def test_whole_blocks_need_a_pool_that_all_layers_share(device: str) -> None:
    apart = {"device": device, "device_pool": "per_layer"}
    assert HybridSparseConfig.from_mapping(apart).device_resident_share == 0.0
    assert refusal_of({**apart, "device_resident_share": 0.5}) == (
        "hybrid_sparse.device_resident_share=0.5: needs device_pool unified, since a block is of all layers, and the "
        "pool is per_layer"
    )


def test_the_slots_of_a_gpu_are_counted_by_its_worker_unless_they_are_given() -> None:
    assert HybridSparseConfig(device="cuda").device_pool_pages is None
    assert HybridSparseConfig(device="cuda", device_pool_pages=2**25).device_pool_pages == 2**25
    assert HybridSparseConfig(device="cuda").host_share == "none"


@pytest.mark.parametrize("device", ["emulated", "cuda"])
def test_fluxion_s_host_takes_from_the_queue_unless_the_user_says_otherwise(device: str) -> None:
    """Fluxion, section 6.2. Its rows are neither resident nor ranked by the device, which `host_share` would forbid."""
    fluxion = HybridSparseConfig(policy="fluxion", device=device)
    assert fluxion.host_share == "queue"
    assert (fluxion.device_ranking, fluxion.device_resident_share) == (None, None)
    assert HybridSparseConfig(policy="fluxion", device=device, host_share="none").host_share == "none"
    assert HybridSparseConfig(policy="fluxion").host_share is None
    others = [HybridSparseConfig(policy=policy, device=device) for policy in ("dense", "topk", "progressive")]
    assert [other.host_share for other in others] == ["none"] * 3
    assert [other.device_ranking for other in others] == ["device" if device == "cuda" else "host"] * 3


@pytest.mark.parametrize("device", ["emulated", "cuda"])
def test_hgca_divides_a_device_s_work_by_itself(device: str) -> None:
    shared = HybridSparseConfig.from_mapping({"policy": "fluxion", "device": device, "host_share": "uniform"})
    assert shared.host_share == "uniform"
    assert HybridSparseConfig.from_mapping({"policy": "hgca", "device": device}).host_share is None
    refusal = refusal_of({"policy": "hgca", "device": device, "host_share": "queue"})
    assert refusal.startswith(
        "hybrid_sparse.host_share='queue': used by policy dense and topk and progressive and fluxion only"
    )


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        HybridSparseConfig().threshold = 0.5  # type: ignore[misc]


def test_the_table_has_one_row_a_setting() -> None:
    rows = [row.split("|")[1].strip(" `") for row in settings_table().splitlines()[2:]]
    assert rows == NAMES


def test_the_readme_carries_the_table() -> None:
    assert settings_table() in (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_reading_settings_loads_neither_torch_nor_vllm() -> None:
    program = "import sys, vllm_hybrid_sparse.config as c; assert not {'torch', 'vllm', 'numpy'} & set(sys.modules), c"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
