"""The settings that docs/POLICIES.md gives for each paper are accepted, and mean what the paper says."""

import re
from pathlib import Path

import pytest

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.predictor.choice import choose_predictor
from vllm_hybrid_sparse.predictor.model import ModelShape
from vllm_hybrid_sparse.values import RetainedSet

POLICIES = Path(__file__).parents[2] / "docs" / "POLICIES.md"


def documented() -> dict[str, dict[str, str]]:
    """The settings in the table, by paper."""
    section = (
        POLICIES.read_text(encoding="utf-8").partition("\n## Each paper as a combination\n")[2].partition("\n## ")[0]
    )
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    return {row[0].removeprefix("| "): dict(re.findall(r"`(\w+): ([\w.]+)`", row[1])) for row in rows}


@pytest.fixture(params=["emulated", "cuda"])
def papers(request: pytest.FixtureRequest) -> dict[str, HybridSparseConfig]:
    """What the table's settings come to on each device."""
    return {
        paper: HybridSparseConfig.from_mapping({**settings, "device": request.param})
        for paper, settings in documented().items()
    }


def test_every_paper_is_in_the_table(papers: dict[str, HybridSparseConfig]) -> None:
    assert list(papers) == ["PSA", "HGCA", "Fluxion"]


def test_psa_reads_until_the_threshold_by_its_own_rule_from_one_lru_pool(papers: dict[str, HybridSparseConfig]) -> None:
    """PSA, algorithm 1, sections 3.1 (cuboid-mean), 3.4 (one pool, LRU) and 4 (admission)."""
    psa = papers["PSA"]
    spec = psa.selection
    assert (spec.ranked, spec.threshold, spec.estimated_remainder, spec.attributed) == (True, 0.95, False, 0.0)
    assert (psa.summary, psa.device_pool, psa.device_eviction) == ("cuboid_mean", "unified", "lru")
    assert (psa.device_ranking, psa.device_resident_share, psa.host_share) == ("host", 0.0, "none")
    assert psa.admission == "working_set"
    assert psa.retained == RetainedSet(sink_tokens=0, window_tokens=16)  # the least that there can be


def test_hgca_judges_by_its_beta_and_has_recent_tokens_alone_in_its_window(
    papers: dict[str, HybridSparseConfig],
) -> None:
    """HGCA, sections 3.2.1 (a ring for each layer), 3.2.2 and 5.4."""
    hgca = papers["HGCA"]
    assert hgca.salience is not None
    assert hgca.salience.beta == 1.0
    assert (hgca.device_pool, hgca.device_eviction) == ("per_layer", "fifo")
    assert hgca.retained == RetainedSet(sink_tokens=0, window_tokens=4096)


def test_fluxion_chooses_the_granularity_by_bounds_and_shares_one_queue(papers: dict[str, HybridSparseConfig]) -> None:
    """Fluxion, sections 5.3, 6.2 and 8.1."""
    fluxion = papers["Fluxion"]
    spec = fluxion.prediction
    assert spec is not None
    assert (spec.granularity, spec.dense_tokens, spec.ranking.summary) == (0, 0, "minmax")
    assert (fluxion.host_share, fluxion.selection.attributed) == ("queue", 0.0)
    assert fluxion.retained == RetainedSet(sink_tokens=64, window_tokens=256)


def test_the_shipped_predictor_for_bounds_serves_the_combination(papers: dict[str, HybridSparseConfig]) -> None:
    spec = papers["Fluxion"].prediction
    assert spec is not None
    smollm2 = ModelShape(layers=30, query_heads=9, kv_heads=3, head_dim=64)
    _, origin = choose_predictor(spec, smollm2, papers["Fluxion"].retained)
    assert origin.ranking == spec.ranking
