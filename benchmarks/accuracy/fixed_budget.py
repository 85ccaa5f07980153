"""Fluxion's strongest baseline, fixed (blk, bgt): every head reads the same share of the host segment (its section 8).

It is policy `fluxion` with a predictor that says so for every head, so the shipped kernels rank the blocks, share them
within a group and read them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.hf.shape import model_shape
from vllm_hybrid_sparse.predictor.model import ModelShape, Predictor, PredictorOrigin
from vllm_hybrid_sparse.values import PageRanking, RetainedSet


def write_fixed_predictor(
    path: Path, budget: float, shape: ModelShape, retained: RetainedSet, ranking: PageRanking
) -> None:
    """Write a predictor that gives every head of a model the same budget at every granularity, and lets none stream.

    budget   share of the host segment, above 0 and at most 1, else ValueError
    """
    if not 0 < budget <= 1:
        raise ValueError(f"budget={budget}: must be above 0 and at most 1")
    predictor = Predictor()
    predictor.target_mean.copy_(torch.tensor([budget, 0.0]))
    predictor.target_std.zero_()
    with torch.no_grad():
        predictor.outputs.weight.zero_()
        predictor.outputs.bias.copy_(torch.tensor([0.0, 0.0, -100.0]))
    origin = PredictorOrigin(
        shape=shape, model="", tau=0.1, retained=retained, ranking=ranking, command="none", validation={}
    )
    predictor.save(path, origin)


def with_fixed_predictor(settings: Mapping[str, Any], budget: float, model: Path, path: Path) -> dict[str, Any]:
    """The settings of a server; if their policy needs a predictor, with one of this budget, written to `path`.

    model   folder of the model; only its configuration is read
    """
    config = HybridSparseConfig.from_mapping(settings)
    if config.prediction is None:
        return dict(settings)
    shape = model_shape(AutoConfig.from_pretrained(model).get_text_config())
    write_fixed_predictor(path, budget, shape, config.retained, config.prediction.ranking)
    return {**settings, "predictor": str(path)}
