"""Random layers for the tests of the predictor."""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_hybrid_sparse.values import RetainedSet

RETAINED = RetainedSet(sink_tokens=16, window_tokens=16)
HEAD_DIM = 8
SCALE = HEAD_DIM**-0.5


class Layer(NamedTuple):
    """One decode query of a layer, float64."""

    query: Tensor  # [q_heads, head_dim]
    keys: Tensor  # [kv_heads, tokens, head_dim]
    values: Tensor


def random_layer(group: int, tokens: int, seed: int, *, kv_heads: int = 2, sharpness: float = 3.0) -> Layer:
    """A layer whose heads differ: the first KV head's values are small, the first query head hardly chooses."""
    generator = torch.Generator().manual_seed(seed)
    query = sharpness * torch.randn(kv_heads * group, HEAD_DIM, generator=generator, dtype=torch.float64)
    keys, values = (torch.randn(kv_heads, tokens, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    query[0] *= 0.1
    values[0] *= 0.2
    return Layer(query, keys, values)
