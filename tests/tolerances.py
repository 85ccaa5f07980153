"""How far a result may lie from its float64 reference, by the dtype it was computed in: one table for all tests.

Each covers one rounding of the result. For bf16 it also covers one of every attention weight, since the kernels hold
weights in the KV dtype. Values have unit size. The worst error in the native tests is about half of what is allowed
(EPYC 9005, all four instruction sets), so there is no slack in which a wrong page or a wrong scale could hide.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """|actual - expected| <= absolute + relative * |expected|."""

    relative: float
    absolute: float


OUTPUT = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(8e-3, 8e-3),
}

SCORE_TIE = 1e-4
"""Group scores (natural log) this close may rank either way: they are float32 sums of a few hundred products."""

CODE_TIE = 2e-3
"""The same for weights estimated from key codes: 2^x to 1e-4, and an 8-bit element of a query may round either way."""

THRESHOLD_TIE = 1e-5
"""A P_acc this close to the threshold may stop or go on."""

WEIGHT_TIE = 1e-4
"""Attention weights (HGCA's salience) this close to the limit, relative to it, may lie on either side."""


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare in float64 under the tolerance of `dtype`, by default the dtype of `actual`."""
    relative, absolute = OUTPUT[dtype or actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=relative, atol=absolute)
