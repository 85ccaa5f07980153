"""The selector of eq. 3, compared with trying every granularity."""

import math

import numpy as np
import pytest

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.policy.budget import GRANULARITIES, predicted_budgets, select_budgets


def literal(
    base: list[float], growth: list[float], streaming: list[bool], host_tokens: int
) -> tuple[int, list[int], float]:
    """Select for one group, as section 5.3 words it."""
    if all(streaming) or host_tokens == 0:
        return 0, [0] * len(base), 0.0
    best: tuple[float, int, list[float]] | None = None
    for blk in GRANULARITIES:
        budgets = [
            0.0 if s else min(1.0, max(0.0, b + k * math.log2(blk)))
            for b, k, s in zip(base, growth, streaming, strict=True)
        ]
        volume = 2 * host_tokens / blk + 2 * host_tokens * sum(budgets)
        if best is None or volume <= best[0]:  # of equals, the coarser
            best = volume, blk, budgets
    assert best is not None
    volume, blk, budgets = best
    blocks = [
        0 if s else max(1, min(math.ceil(b * host_tokens / blk - 1e-6), math.ceil(host_tokens / blk)))
        for b, s in zip(budgets, streaming, strict=True)
    ]
    return blk, blocks, volume


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("host_tokens", [0, 16, 112, 128, 144, 4096, 100_000])
def test_least_volume_is_chosen(group: int, host_tokens: int) -> None:
    rng = np.random.default_rng(group * 1_000_003 + host_tokens)
    groups = 60
    base = rng.uniform(-0.05, 0.4, (groups, group)) * rng.choice([0.05, 1.0], (groups, 1))
    growth = rng.uniform(-0.01, 0.1, (groups, group)) * rng.choice([0.0, 0.02, 1.0], (groups, 1))
    streaming = rng.random((groups, group)) < rng.choice([0.2, 0.9], (groups, 1))
    chosen = select_budgets(base, growth, streaming, host_tokens)
    for index in range(groups):
        blk, blocks, volume = literal(
            base[index].tolist(), growth[index].tolist(), streaming[index].tolist(), host_tokens
        )
        assert chosen.granularity[index] == blk
        assert chosen.blocks[index].tolist() == blocks
        assert chosen.volume[index] == pytest.approx(volume, rel=1e-12)
    if host_tokens == 4096:
        assert {0, 16, 128} <= set(chosen.granularity.tolist())  # the cases do reach the ends


def test_flat_budgets_take_the_coarsest_blocks_and_steep_ones_the_finest() -> None:
    base, streaming = np.full((2, 1), 0.01), np.zeros((2, 1), bool)
    chosen = select_budgets(base, np.array([[0.0], [0.2]]), streaming, 8192)
    assert chosen.granularity.tolist() == [128, 16]
    assert chosen.blocks.tolist() == [[1], [415]]  # ceil(0.01 * 8192 / 128), ceil(0.81 * 8192 / 16)


def test_of_two_equal_volumes_the_coarser_blocks_are_chosen() -> None:
    chosen = select_budgets(np.array([[0.25]]), np.array([[1 / 32]]), np.zeros((1, 1), bool), 4096)
    assert chosen.granularity.tolist() == [32]  # blocks of 16 tokens cost the same: 1/32 more of blocks, 1/32 less read


def test_streaming_heads_read_nothing_and_cost_nothing() -> None:
    base, growth = np.full((2, 2), 0.25), np.zeros((2, 2))
    chosen = select_budgets(base, growth, np.array([[True, False], [True, True]]), 1024)
    assert chosen.granularity.tolist() == [128, 0]
    assert chosen.blocks.tolist() == [[0, 2], [0, 0]]
    assert chosen.volume.tolist() == [2 * 1024 / 128 + 2 * 1024 * 0.25, 0.0]


def test_a_whole_number_of_blocks_from_float32_costs_no_block_more() -> None:
    base = np.array([[np.float32(0.1)]])  # 0.10000000149
    assert select_budgets(base, np.zeros((1, 1)), np.zeros((1, 1), bool), 12_800).blocks.tolist() == [[10]]


def test_budgets_stay_within_nothing_and_everything() -> None:
    assert predicted_budgets(np.array([-0.1, 0.5, 0.9]), np.array([0.0, 0.1, 0.1]), 16).tolist() == [0.0, 0.9, 1.0]


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"growth=\(2, 2\)"):
        select_budgets(np.zeros((2, 3)), np.zeros((2, 2)), np.zeros((2, 3), bool), 16)
    with pytest.raises(ConfigError, match="host_tokens=-1"):
        select_budgets(np.zeros((1, 1)), np.zeros((1, 1)), np.zeros((1, 1), bool), -1)


@pytest.mark.parametrize("blk", GRANULARITIES)
def test_of_one_granularity_nothing_is_chosen(blk: int) -> None:
    base, growth, streaming = (
        np.array([[0.1, 0.3], [0.2, 0.0]]),
        np.full((2, 2), 0.01),
        np.array([[0, 0], [1, 1]], bool),
    )
    chosen = select_budgets(base, growth, streaming, 1000, (blk,))
    assert chosen.granularity.tolist() == [blk, 0]
    budgets = predicted_budgets(base[0], growth[0], blk)
    assert chosen.blocks[0].tolist() == [math.ceil(budget * 1000 / blk - 1e-6) for budget in budgets]
    assert chosen.volume[0] == pytest.approx(2000 / blk + 2000 * budgets.sum())
