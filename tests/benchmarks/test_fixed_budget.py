"""With fixed budgets (a baseline) every head selects the same share of the blocks, and a group reads the union."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from benchmarks.accuracy.fixed_budget import with_fixed_predictor, write_fixed_predictor
from benchmarks.accuracy.selections import FIXED_BUDGETS, SELECTIONS, open_decoding
from tests.benchmarks.tiny import tiny_model
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.hf import DecodeStep
from vllm_hybrid_sparse.hf.shape import model_shape
from vllm_hybrid_sparse.kernels.fluxion.reference import best_blocks, block_scores
from vllm_hybrid_sparse.predictor.choice import choose_predictor
from vllm_hybrid_sparse.predictor.model import ModelShape
from vllm_hybrid_sparse.values import PageRanking, RetainedSet

TOKENS = 64 + 40 * 16 + 256 + 5
BUDGET_BLOCKS = 2  # 5 % of 40 candidates


@pytest.mark.parametrize(
    ("selection", "ranking"),
    [
        ("fixed16-minmax-5%", PageRanking(summary="minmax", code_bits=None)),
        ("fixed16-codes2-5%", PageRanking()),
    ],
)
@torch.inference_mode()
def test_each_head_reads_its_best_five_percent_of_the_pages(selection: str, ranking: PageRanking) -> None:
    model, steps, cache = tiny_model(), list[DecodeStep](), DynamicCache()
    ids = torch.randint(256, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with open_decoding(model, selection, max_tokens=TOKENS, watch=steps.append) as decoding:
        model(ids[:, :-1], past_key_values=cache)
        model(ids[:, -1:], past_key_values=cache)
        stats = decoding.take_stats()
    shared = 0
    for step in steps:
        for rows, keys, plan in zip(step.query.unflatten(0, (2, -1)), step.keys, step.plans, strict=True):
            scores = block_scores(rows, keys[64 : 64 + 640], 16, step.scale, ranking)
            assert plan == [4 + page for page in best_blocks(scores, [BUDGET_BLOCKS] * 3)]
            shared += len(plan) < 3 * BUDGET_BLOCKS
    assert shared > 0
    assert stats.anchor_bytes > 0


def test_fixed_budgets_are_of_blocks_of_one_page() -> None:
    assert FIXED_BUDGETS["fixed16-minmax-2%"] == 0.02
    assert all(SELECTIONS[name]["granularity"] == 16 for name in FIXED_BUDGETS)


@pytest.mark.parametrize("budget", [0.0, 1.01])
def test_a_budget_that_is_no_share_is_refused(budget: float, tmp_path: Path) -> None:
    shape = ModelShape(layers=1, query_heads=1, kv_heads=1, head_dim=16)
    with pytest.raises(ValueError, match=f"budget={budget}: must be above 0 and at most 1"):
        write_fixed_predictor(tmp_path / "p", budget, shape, RetainedSet(), PageRanking())


def test_settings_of_fluxion_get_a_predictor_of_the_model_in_a_folder(tmp_path: Path) -> None:
    tiny_model().config.save_pretrained(tmp_path)
    settings = with_fixed_predictor({"policy": "fluxion"}, 0.25, tmp_path, tmp_path / "fixed.safetensors")
    config = HybridSparseConfig.from_mapping(settings)
    assert config.prediction is not None
    predictor, origin = choose_predictor(config.prediction, model_shape(tiny_model().config), config.retained)
    properties = predictor.predict(torch.randn(5, predictor.feature_mean.numel()))
    assert (properties.base_budget == 0.25).all()
    assert (properties.growth == 0).all()
    assert (properties.streaming < 0.5).all()
    assert origin.ranking == PageRanking()
    assert with_fixed_predictor({"policy": "topk"}, 0.25, tmp_path, tmp_path / "other") == {"policy": "topk"}
