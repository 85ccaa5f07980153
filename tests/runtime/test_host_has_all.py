"""`host_share` all: the device attends to the retained set alone, and the host to everything that lies outside it."""

from typing import Any

import pytest

from tests.kernels.fluxion_checks import MirroredFluxion, constant_predictor
from tests.kernels.served_layer import Shape
from tests.kernels.step_checks import check_step
from tests.runtime.tiered_layer import TieredModel
from vllm_hybrid_sparse.values import PAGE_TOKENS

SINK_TOKENS, WINDOW_TOKENS = 16, 32
SMALL = {"sink_tokens": SINK_TOKENS, "window_tokens": WINDOW_TOKENS, "host_share": "all"}
LENGTHS = (1, 48, 49, 64, 65, 200, 333)
KV_HEADS = 2  # of a `Shape`


def pages_between(tokens: int) -> int:
    """Pages between sink and window."""
    return max(0, (tokens - WINDOW_TOKENS) // PAGE_TOKENS - SINK_TOKENS // PAGE_TOKENS)


def retained_pages(tokens: int) -> int:
    """Pages of the retained set."""
    return -(-tokens // PAGE_TOKENS) - pages_between(tokens)


POLICIES: dict[str, dict[str, Any]] = {
    "dense": {"policy": "dense"},
    "everything": {"policy": "progressive", "threshold": 1.0, "microbatch_pages": 4},
    "topk": {"policy": "topk", "topk_pages": 3, "summary": "minmax"},
    "psa": {"policy": "progressive", "threshold": 0.9, "microbatch_pages": 2, "summary": "cuboid_mean"},
    "codes": {"policy": "progressive", "threshold": 0.9, "microbatch_pages": 2},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_device_reads_the_retained_set_and_no_page_more(policy: str, kind: str) -> None:
    """Answers are the references'. If everything is read, they are those of full attention."""
    settings = {**SMALL, **POLICIES[policy], "device_pool_pages": 128, "device": kind, "device_resident_share": 0}
    steps = 3
    with TieredModel(settings | {"device_ranking": "host"}) as model:
        requests = [model.start() for _ in LENGTHS]
        model.step([(request, length) for request, length in zip(requests, LENGTHS, strict=True)], decode=False)
        excuses = []
        for _ in range(steps):
            for layer, step in zip(model.layers, model.step([(request, 1) for request in requests]), strict=True):
                excuses += check_step(layer, step)
        assert len(excuses) <= 4, excuses
        tiers = model.tier.take_stats()
        lengths = [length + step for length in LENGTHS for step in range(1, steps + 1)]
        assert tiers.pages_wanted == KV_HEADS * sum(retained_pages(tokens) for tokens in lengths)
        assert tiers.groups_on_host == KV_HEADS * sum(pages_between(tokens) > 0 for tokens in lengths)
        everything = KV_HEADS * sum(pages_between(tokens) for tokens in lengths)
        if policy in ("dense", "everything"):
            assert tiers.pages_on_host == everything
        else:
            assert 0 < tiers.pages_on_host < everything


@pytest.mark.parametrize("budget", [0.05, 1.0])
def test_a_fixed_hybrid_reads_each_heads_budget_on_the_host(kind: str, budget: float) -> None:
    """Fluxion's baseline: the same share for every head, and the group reads the union. A share of 1 reads all."""
    shape = Shape(num_q_heads=6, num_kv_heads=KV_HEADS, head_dim=16, block_tokens=32)
    settings = {
        **SMALL,
        "policy": "fluxion",
        "summary": "minmax",
        "granularity": PAGE_TOKENS,
        "dense_tokens": 0,
        "device": kind,
        "device_pool_pages": 64,
    }
    model = TieredModel(settings, shape=shape, num_blocks=80)
    config = model.config
    mirror = MirroredFluxion(
        model.layers[0].shape,
        constant_predictor(budget),
        config.retained,
        granularity=PAGE_TOKENS,
        attributed=config.selection.attributed,
        dense_tokens=0,
        layer=model.layers[0],
    )
    with model:
        requests = [(mirror.start(), length) for length in (200, 700)]
        mirror.step(*requests)
        mirror.step(*((request, 1) for request, _ in requests))
        tiers = model.tier.take_stats()
        between = [pages_between(length + 1) for _, length in requests]
        assert tiers.pages_wanted == KV_HEADS * sum(retained_pages(length + 1) for _, length in requests)
        assert tiers.groups_on_host == KV_HEADS * len(requests)
        if budget == 1.0:
            assert tiers.pages_on_host == KV_HEADS * sum(between)
        else:
            heads = shape.num_q_heads // KV_HEADS
            least = [-(-pages // 20) for pages in between]
            assert KV_HEADS * sum(least) <= tiers.pages_on_host <= KV_HEADS * heads * sum(least)
