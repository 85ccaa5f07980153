"""Merging attention states with FlashInfer's `merge_state`. The only file that imports FlashInfer."""

import math

import torch
from flashinfer.cascade import merge_state
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError

DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of outputs that FlashInfer merges; float32 is not among them."""

_EMPTY = -1e30
"""Stands for -inf, which FlashInfer turns into NaN if both states are empty. No real log-sum-exp comes near it."""


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Fold two partial attentions over disjoint keys into one, as `merge_states` of reference.py does.

    FlashInfer's log-sum-exp is of base 2 and ours is natural; only this file converts.

    out_a, out_b   [rows, q_heads, head_dim]   bf16 | f16 on a GPU, or its view of pinned host memory; zeros where a
                                               state is empty, since here they are multiplied by a weight of 0
    lse_a, lse_b   [rows, q_heads]             f32, natural log, -inf where no key was seen
    returns        (out, lse); empty with empty gives zeros and -inf, never NaN
    """
    if out_a.dtype not in DTYPES:
        raise KernelError(f"out_a={out_a.dtype}: must be bfloat16 or float16, FlashInfer merges no other")
    out, lse2 = merge_state(out_a, _to_base_2(lse_a), out_b, _to_base_2(lse_b))
    return out, torch.where(lse2 > _EMPTY / 2, lse2 * math.log(2), -torch.inf)


def _to_base_2(lse: Tensor) -> Tensor:
    return (lse * math.log2(math.e)).clamp(min=_EMPTY)
