"""What cannot be served is refused at start-up, with a text that names what and why."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.system.engine_jobs import run_jobs
from tests.system.tiny_models import REFUSED, make_tiny_model
from tests.system.variants import START_TIMEOUT_S, our_args, server_env, stock_args
from vllm_hybrid_sparse.cli.server import Server, ServerError


@dataclass(frozen=True, slots=True)
class Refusal:
    """A start that must fail, and patterns that its error must match, each of them."""

    patterns: tuple[str, ...]
    settings: Any = field(default_factory=dict)
    model: str = "llama-gqa"
    options: dict[str, Any] = field(default_factory=dict)


BAD_SETTINGS = {
    "unknown-policy": Refusal((r"policy=.?greedy", "dense", "topk", "progressive"), {"policy": "greedy"}),
    "threshold-zero": Refusal((r"threshold=0\b", r"above 0"), {"threshold": 0}),
    "threshold-above-one": Refusal((r"threshold=1\.5", r"at most 1"), {"threshold": 1.5}),
    "threshold-text": Refusal((r"threshold=.?abc",), {"threshold": "abc"}),
    "threshold-of-topk": Refusal((r"threshold=0\.9", "topk"), {"policy": "topk", "threshold": 0.9}),
    "unknown-key": Refusal((r"\btreshold\b", r"threshold"), {"treshold": 0.9}),
    "ratio-and-pages": Refusal(("topk_ratio", "topk_pages"), {"policy": "topk", "topk_ratio": 0.05, "topk_pages": 8}),
    "ratio-zero": Refusal((r"topk_ratio=0",), {"policy": "topk", "topk_ratio": 0.0}),
    "unknown-summary": Refusal((r"summary=.?codes", "minmax", "cuboid_mean"), {"summary": "codes"}),
    "ragged-window": Refusal((r"window_tokens=100", "16"), {"window_tokens": 100}),
    "unknown-isa": Refusal((r"isa=.?neon", "avx2", "scalar"), {"isa": "neon"}),
    "pool-of-each-layer": Refusal(
        (r"device_pool_pages=64: must be at least 96", "for each of 3 layers"),
        {"device": "emulated", "device_pool": "per_layer", "device_pool_pages": 64},
    ),
    "not-a-table": Refusal((r"hybrid_sparse",), "progressive"),
}
BAD_OPTIONS = {
    "e5m2-kv-cache": Refusal((r"kv_cache_dtype=fp8_e5m2", r"fp8 \(e4m3\)"), options={"kv_cache_dtype": "fp8_e5m2"}),
    "fp8-kv-cache-beside-a-device": Refusal(
        (r"kv_cache_dtype=fp8: is not supported with device=emulated",),
        {"device": "emulated"},
        options={"kv_cache_dtype": "fp8"},
    ),
    "block-size": Refusal((r"\b24\b", r"block"), options={"block_size": 24}),
    "another-worker": Refusal(
        (r"worker_cls: must be auto",), options={"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}
    ),
    "dual-chunk": Refusal(
        (r"dual_chunk_attention_config=", "dual-chunk attention is not supported"),
        options={"hf_overrides": {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}}},
    ),
    "prompts-that-layers-skip": Refusal(
        (r"kv_sharing_fast_prefill=True: is not supported",), options={"kv_sharing_fast_prefill": True}
    ),
    "speculative-and-offloading": Refusal(
        (r"speculative_config.method=ngram: speculative decoding is not supported with kv_offloading_size=1.0",),
        options={
            "kv_offloading_size": 1.0,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
        },
    ),
    "speculative": Refusal(
        (r"speculative_config.method=ngram: speculative decoding is not supported with device=emulated",),
        {"device": "emulated"},
        options={"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
    ),
}
BAD_SETTINGS_OF_MODELS = {
    "window-and-device": Refusal(
        (r"sliding_window=200: is not supported with device=emulated", "--disable-sliding-window"),
        {"device": "emulated"},
        model="mistral-sliding",
    ),
    "window-and-hgca": Refusal(
        (r"sliding_window=150: is not supported with policy=hgca",), {"policy": "hgca"}, model="gemma3"
    ),
}
BAD_MODELS = {
    "bloom": Refusal((r"(?i)alibi",), model="bloom"),
    "gemma2": Refusal((r"attn_logit_softcapping=50.0: soft-capped",), model="gemma2"),
    "deepseek-v2": Refusal((r"MLA|latent",), model="deepseek-v2"),
    "llama-dim20": Refusal((r"head.?(size|dim)", r"\b20\b"), model="llama-dim20"),
}
CASES = BAD_SETTINGS | BAD_OPTIONS | BAD_SETTINGS_OF_MODELS | BAD_MODELS


def _job(name: str, refusal: Refusal, models: Path) -> dict[str, Any]:
    engine_args = {
        "model": str(make_tiny_model(refusal.model, models)),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 64 << 20,
        "attention_backend": "hybrid_sparse",
        "additional_config": {"hybrid_sparse": refusal.settings},
    }
    return {"name": name, "engine_args": engine_args | refusal.options}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The error of every case, and one case that must start: it shows that the refusals have no other reason."""
    folder = tmp_path_factory.mktemp("refusals")
    jobs = [_job(name, refusal, folder) for name, refusal in CASES.items()]
    return run_jobs([*jobs, _job("served", Refusal(()), folder)], folder / "engines.log", timeout_s=400)


@pytest.mark.parametrize("name", CASES)
def test_is_refused_with_what_and_why(results: dict[str, dict[str, Any]], name: str) -> None:
    """Wrong settings, options and models."""
    error = results[name].get("error")
    assert error is not None, "the engine started"
    missing = [pattern for pattern in CASES[name].patterns if re.search(pattern, error) is None]
    assert not missing, f"the error lacks {missing}:\n{error}"


def test_the_same_engine_starts_without_the_fault(results: dict[str, dict[str, Any]]) -> None:
    """What the cases vary is served when nothing is wrong, even after all those failures."""
    assert "error" not in results["served"], results["served"]["error"]


def test_every_refused_model_is_a_case() -> None:
    """Every checkpoint that is made has a case that uses it."""
    assert {refusal.model for refusal in BAD_MODELS.values()} == set(REFUSED)


@pytest.mark.parametrize(
    ("model", "args", "pattern"),
    [
        pytest.param("llama-gqa", our_args(policy="greedy"), r"policy=.?greedy", id="settings"),
        pytest.param("llama-gqa", [*our_args(), "--kv-cache-dtype=fp8_e5m2"], r"fp8_e5m2", id="option"),
        pytest.param("gemma2", our_args(), r"attn_logit_softcapping=50", id="model"),
    ],
)
def test_server_ends_with_the_reason_in_its_log(model: str, args: list[str], pattern: str, tmp_path: Path) -> None:
    """`vllm serve` exits by itself, with a status that is not 0."""
    checkpoint = make_tiny_model(model, tmp_path)
    shared = [*stock_args("float32", 512, kv_cache_bytes=64 << 20), "--enforce-eager"]
    with (
        Server(checkpoint, shared + args, server_env(), tmp_path / "server.log") as server,
        pytest.raises(ServerError, match=r"ended with status [^0]"),
    ):
        server.wait_ready(START_TIMEOUT_S)
    assert re.search(pattern, server.log_path.read_text(encoding="utf-8", errors="replace"))
