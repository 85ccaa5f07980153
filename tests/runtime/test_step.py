"""Decode rows on two tiers: the same attention as the references, whatever the pool holds and whoever computes."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.kernels.served_layer import ServedLayer, Shape
from tests.kernels.step_checks import check_step
from tests.runtime.broken_pages import break_pages
from tests.runtime.tiered_layer import TieredModel
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError, KernelError, LoadError
from vllm_hybrid_sparse.runtime import tiers
from vllm_hybrid_sparse.runtime.host_side import HostSide
from vllm_hybrid_sparse.runtime.tiers import DeviceTier

SMALL = {"sink_tokens": 16, "window_tokens": 32}
POLICIES: dict[str, dict[str, Any]] = {
    "dense": {"policy": "dense"},
    "topk": {"policy": "topk", "topk_pages": 5},
    "topk-codes": {"policy": "topk", "topk_ratio": 0.3, "summary": "key_codes"},
    "everything": {"policy": "progressive", "threshold": 1.0, "microbatch_pages": 4},
    "psa": {"policy": "progressive", "threshold": 0.9, "microbatch_pages": 2, "summary": "cuboid_mean"},
    "codes": {"policy": "progressive", "threshold": 0.9, "microbatch_pages": 2},
    "codes-lightest": {
        "policy": "progressive",
        "threshold": 0.9,
        "microbatch_pages": 2,
        "remainder": "lightest_page",
    },
}
EXACT = ("dense", "everything")
LENGTHS = (1, 15, 16, 17, 33, 48, 49, 64, 65, 200, 333)


def serve(model: TieredModel, lengths: Sequence[int], steps: int = 4, **options: Any) -> list[str]:
    """Prefill requests and decode them side by side, checking every step; return the excuses of `check_step`."""
    requests = [model.start() for _ in lengths]
    for request, length in zip(requests, lengths, strict=True):
        for layer, step in zip(model.layers, model.step([(request, length)], decode=False), strict=True):
            check_step(layer, step)
    excuses = []
    for _ in range(steps):
        for layer, step in zip(
            model.layers, model.step([(request, 1) for request in requests], **options), strict=True
        ):
            excuses += check_step(layer, step)
    return excuses


def smallest_pool(settings: dict[str, Any], layers: int = 1) -> int:
    return 2 * int(settings.get("microbatch_pages", 16 if settings["policy"] == "progressive" else 8)) * layers


@pytest.mark.parametrize("host_share", ["none", "uniform", "length", "queue"])
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_those_of_the_references(policy: str, host_share: str) -> None:
    """Page for page, with requests of every length around pages and the retained set."""
    settings = {**SMALL, **POLICIES[policy], "device_pool_pages": 256, "host_share": host_share}
    with TieredModel(settings) as model:
        excuses = serve(model, LENGTHS, sharpness=3.0)
        assert len(excuses) <= 4, excuses
        stats = model.tier.take_stats()
        assert stats.groups == 4 * len(LENGTHS) * 2
        assert (stats.groups_on_host > 0) == (stats.host_busy_s > 0) == (host_share != "none")
        assert stats.device_busy_s + stats.host_busy_s < 2 * stats.step_s
        assert stats.pages_hit + stats.pages_fetched == stats.pages_wanted


@pytest.mark.parametrize(
    ("policy", "ranking"),
    [("topk", "host"), ("topk-codes", "host"), ("psa", "host"), ("codes", "host"), ("codes", "device")],
)
def test_pages_that_decoding_fills_are_ranked_by_what_they_hold(policy: str, ranking: str, kind: str) -> None:
    """A page that is filled becomes a candidate when the window has left it, 32 to 47 steps later."""
    settings = {**SMALL, **POLICIES[policy], "device_pool_pages": 256, "device": kind, "device_ranking": ranking}
    with TieredModel(settings) as model:
        excuses = serve(model, (90, 100), steps=64)
        assert len(excuses) <= 8, excuses
        stats = model.tier.take_stats()
        assert (stats.ranked_groups > 0) == (ranking == "device")


@pytest.mark.parametrize("policy", ["topk", "everything"])
def test_rows_that_decode_behind_prompts_of_the_step(policy: str, kind: str) -> None:
    settings = {**SMALL, **POLICIES[policy], "device_pool_pages": 256, "device": kind}
    with TieredModel(settings, layers=2) as model:
        prompt, row, other = (model.start() for _ in range(3))
        model.step([(row, 130), (other, 75)], decode=False)
        for tokens in (40, 16, 7, 90, 33):
            steps = model.step([(prompt, tokens), (row, 1), (other, 1)])
            for layer, step in zip(model.layers, steps, strict=True):
                assert check_step(layer, step) == []


@pytest.mark.parametrize("eviction", ["cyclic", "lru", "fifo"])
@pytest.mark.parametrize("pool", ["unified", "per_layer"])
def test_the_pool_is_as_the_settings_say(pool: str, eviction: str) -> None:
    settings = {**SMALL, "policy": "dense", "device_pool_pages": 64, "device_pool": pool, "device_eviction": eviction}
    with TieredModel(settings, layers=2) as model:
        shape = model.tier.pool.shape
        assert (shape.unified, shape.eviction) == (pool == "unified", eviction)


@pytest.mark.parametrize("pool", ["unified", "per_layer"])
@pytest.mark.parametrize("eviction", ["cyclic", "lru", "fifo"])
@pytest.mark.parametrize("policy", EXACT)
def test_a_pool_of_one_group_evicts_in_every_step_and_stays_exact(policy: str, eviction: str, pool: str) -> None:
    settings = {**SMALL, **POLICIES[policy], "device_pool": pool, "device_eviction": eviction}
    least = smallest_pool(settings, layers=2 if pool == "per_layer" else 1)
    with TieredModel({**settings, "device_pool_pages": least}, layers=2) as model:
        serve(model, (40, 130, 333), steps=2)
        model.tier.take_stats()
        evicted = 0
        for _ in range(3):
            serve(model, (40, 130), steps=1)
            stats = model.tier.take_stats()
            assert stats.pages_evicted > evicted
    with pytest.raises(ConfigError, match=f"device_pool_pages={least - 1}: must be at least {least}"):
        TieredModel({**settings, "device_pool_pages": least - 1}, layers=2)


def test_a_pool_that_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SMALL, "policy": "dense"}
    with TieredModel({**settings, "device_pool_pages": 64}) as model:
        page_bytes = model.tier.pool.key[0].nbytes * 2
    monkeypatch.setattr(tiers, "available_bytes", lambda: 64 * page_bytes)
    with TieredModel({**settings, "device_pool_pages": 64}) as model:
        serve(model, (17,), steps=1)
    with pytest.raises(ConfigError, match=r"^hybrid_sparse\.device_pool_pages=65: must be at most 64, pages of"):
        TieredModel({**settings, "device_pool_pages": 65})


def test_a_pool_that_a_gpu_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranking takes codes and places of all pages of the store from the same memory. The GPU is pretended."""
    settings = HybridSparseConfig.from_mapping({"device": "cuda", "device_pool_pages": 65})
    layer = ServedLayer(Shape(summary="key_codes"), num_blocks=10)
    kernel, layout, gpu = layer.attention, layer.shape.layout, torch.device("cuda", 1)
    stored_pages = 10 * kernel.num_kv_heads * layout.pages_per_block
    of_pages = {"mem_get_info": (64 * layout.page_bytes, 1 << 40), "memory_reserved": 700, "memory_allocated": 600}
    ranking_bytes = stored_pages * (layout.summary_bytes + 4)
    for name, value in of_pages.items():
        monkeypatch.setattr(torch.cuda, name, {gpu: value}.__getitem__)
    least = 64 - -(-(ranking_bytes - 100) // layout.page_bytes)
    rule = rf"device_pool_pages=65: must be at most {least}, pages of .* of GPU memory .* beside .* for ranking"
    with pytest.raises(ConfigError, match=rule):
        DeviceTier(settings, [layer.kv_cache], kernel, device=gpu)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (3, 1), (8, 2), (8, 1)])
def test_every_dtype_and_group(dtype: torch.dtype, q_heads: int, kv_heads: int) -> None:
    shape = Shape(dtype=dtype, num_q_heads=q_heads, num_kv_heads=kv_heads, block_tokens=16)
    with TieredModel({**SMALL, "policy": "dense", "device_pool_pages": 64}, shape=shape) as model:
        serve(model, (17, 150), steps=2)


def test_blocks_of_others_are_never_read() -> None:
    """Requests end and their blocks are given out again, while pages of theirs still have slots in the pool."""
    with TieredModel({**SMALL, "policy": "dense", "device_pool_pages": 512}, num_blocks=12) as model:
        for length in (300, 290, 17, 200, 310):
            request = model.start()
            model.step([(request, length)], decode=False)
            for layer, step in zip(model.layers, model.step([(request, 1)]), strict=True):
                check_step(layer, step)
            model.layers[0].finish(request[0])


@torch.inference_mode()
def test_a_step_in_inference_mode() -> None:
    """vLLM runs steps so. The mode belongs to the step's thread, and its tensors cannot be written outside the mode."""
    settings = {**SMALL, "policy": "progressive", "threshold": 1.0, "device_pool_pages": 64, "host_share": "queue"}
    with TieredModel(settings) as model:
        serve(model, (17, 150), steps=2)


def test_decode_and_prefill_in_one_step() -> None:
    with TieredModel({**SMALL, "policy": "dense", "device_pool_pages": 64}) as model:
        one, other = model.start(), model.start()
        model.step([(one, 100)], decode=False)
        for tokens in (33, 1, 50):
            for layer, step in zip(model.layers, model.step([(one, 1), (other, tokens)]), strict=True):
                check_step(layer, step)


def test_pages_that_stay_are_not_fetched_again() -> None:
    with TieredModel({**SMALL, "policy": "dense", "device_pool_pages": 64}) as model:
        request = model.start()
        model.step([(request, 160)], decode=False)
        model.step([(request, 1)])
        assert model.tier.take_stats().pages_fetched == 11 * 2
        for _ in range(10):
            for layer, step in zip(model.layers, model.step([(request, 1)]), strict=True):
                check_step(layer, step)
        stats = model.tier.take_stats()
        assert (stats.pages_fetched, stats.pages_hit) == (0, 10 * 11 * 2)


def test_the_stop_ends_loading_early() -> None:
    """Attention is sharp and the threshold low: few of many microbatches are loaded, at most one a group in vain."""
    settings = {**SMALL, "policy": "progressive", "threshold": 0.5, "microbatch_pages": 2, "summary": "minmax"}
    with TieredModel({**settings, "device_pool_pages": 64}) as model:
        request = model.start()
        model.step([(request, 1000)], decode=False)
        model.step([(request, 1)], sharpness=12.0)
        stats = model.tier.take_stats()
        assert stats.early_stops == stats.looked_groups == 2
        assert stats.microbatches < 2 * 20
        assert stats.pages_wasted <= 2 * 2
        assert stats.kept_mass > 2 * 0.5


def test_what_is_read_whole_is_one_round() -> None:
    """For each KV head: the retained set, then in one round all 40 candidates, for which the pool has room."""
    with TieredModel({**SMALL, "policy": "topk", "topk_pages": 40, "device_pool_pages": 1024}) as model:
        request = model.start()
        model.step([(request, 1000)], decode=False)
        (step,) = model.step([(request, 1)])
        check_step(model.layers[0], step)
        stats = model.tier.take_stats()
        assert (stats.microbatches, stats.pages_wanted) == (2 * 2, 2 * (40 + 4))


def test_the_first_round_is_what_the_estimates_take_for_enough() -> None:
    """Flat attention over 59 candidates asks for most of them: 27 microbatches, and few looks."""
    settings = {**SMALL, "policy": "progressive", "threshold": 0.9, "microbatch_pages": 2, "device_pool_pages": 1024}
    with TieredModel(settings) as model:
        request = model.start()
        model.step([(request, 1000)], decode=False)
        (step,) = model.step([(request, 1)], sharpness=0.1)
        check_step(model.layers[0], step)
        decode = model.tier.take_decode_stats()
        assert decode.pages_read > 2 * 45
        assert 2 <= decode.microbatches <= 2 * 3


@pytest.mark.parametrize("host_share", ["none", "uniform"])
@pytest.mark.parametrize(("policy", "looks"), [("psa", 5), ("everything", 0), ("topk", 0)])
def test_looks_at_the_threshold_are_counted_whoever_attends(policy: str, looks: int, host_share: str) -> None:
    """Of 201 tokens, 9 pages lie between sink and window: five microbatches of 2 in each KV head, all needed."""
    settings = {**SMALL, **POLICIES[policy], "device_pool_pages": 64, "host_share": host_share}
    if looks:
        settings["threshold"] = 0.9999
    with TieredModel(settings) as model:
        request = model.start()
        model.step([(request, 200)], decode=False)
        model.step([(request, 1)])
        stats = model.tier.take_decode_stats()
        assert stats.selections == 2
        assert stats.microbatches == 2 * looks
        assert bool(model.tier.take_stats().groups_on_host) == (host_share == "uniform")


@pytest.mark.parametrize("policy", ["psa", "codes"])
def test_who_has_no_candidates_is_not_judged_by_the_threshold(policy: str) -> None:
    with TieredModel({**SMALL, **POLICIES[policy], "device_pool_pages": 64}) as model:
        short, longer = model.start(), model.start()
        model.step([(short, 40)], decode=False)
        model.step([(longer, 150)], decode=False)
        model.step([(short, 1), (longer, 1)])
        stats, read = model.tier.take_stats(), model.tier.take_decode_stats()
        assert (stats.groups, stats.looked_groups) == (2 * 2, 2)
        assert (read.selections, read.judged) == (2 * 2, 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_cannot_be_loaded_is_attended_where_it_lies(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SMALL, **POLICIES[policy], "device_pool_pages": 256}
    with TieredModel(settings) as model:
        failed, sound = model.start(), model.start()
        model.step([(failed, 300)], decode=False)
        model.step([(sound, 300)], decode=False)
        first, fifth, eighth = (2 * failed[0].blocks[index] for index in (0, 4, 7))
        break_pages(model, {(0, first), (0, fifth), (0, eighth + 1)}, monkeypatch)  # the last is the last candidate
        for _ in range(2):
            (step,) = model.step([(failed, 1), (sound, 1)])
            if policy in EXACT or policy.startswith("topk"):
                check_step(model.layers[0], step)
            assert torch.isfinite(step.output).all()
        assert model.tier.take_stats().failed_loads >= 2
        read = model.tier.take_decode_stats()
        assert read.pages_read == read.pages_total or policy not in EXACT


def test_a_failed_load_names_the_request_s_group_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with TieredModel({**SMALL, "policy": "dense", "device_pool_pages": 256}) as model:
        failed, sound = model.start(), model.start()
        model.step([(failed, 300)], decode=False)
        model.step([(sound, 300)], decode=False)
        break_pages(model, {(1, 2 * failed[0].blocks[0])}, monkeypatch)
        reported: list[Exception] = []
        monkeypatch.setattr(model.tier, "report_failure", reported.append)
        model.step([(sound, 1), (failed, 1)])
        assert [type(error) for error in reported] == [LoadError]
        assert f"kv_head=1 page={2 * failed[0].blocks[0]}" in str(reported[0])


def test_of_a_step_that_fails_on_the_host_nothing_still_runs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SMALL, "policy": "dense", "device_pool_pages": 64, "host_share": "uniform"}
    with TieredModel(settings) as model:
        request = model.start()
        model.step([(request, 200)], decode=False)
        run, begun, ended = model.tier.side.run, list[int](), list[int]()
        reads = threading.Event()

        def slowly(*given: Any) -> Any:
            begun.append(1)
            if len(begun) == 2:  # behind the retained set
                reads.set()
                time.sleep(0.3)
            result = run(*given)
            ended.append(1)
            return result

        def fails(*_: Any) -> Any:
            assert reads.wait(10)
            raise RuntimeError("the host's part")

        monkeypatch.setattr(model.tier.side, "run", slowly)
        monkeypatch.setattr(HostSide, "read", fails)
        with pytest.raises(RuntimeError, match="the host's part"):
            model.step([(request, 1)])
        assert len(begun) == len(ended) == 2


def test_a_foreign_cache_is_refused() -> None:
    with TieredModel({**SMALL, "policy": "dense", "device_pool_pages": 64}) as model, pytest.raises(KernelError):
        model.tier.layer_of(torch.empty(3))


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    with TieredModel({**SMALL, "policy": "dense", "device_pool_pages": 64, "host_share": "queue"}) as model:
        serve(model, (100,), steps=1)
        assert threading.active_count() == before + 3
    assert threading.active_count() == before
