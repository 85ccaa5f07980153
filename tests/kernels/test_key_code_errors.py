"""How far scores estimated from key codes are off."""

import pytest
import torch

from vllm_hybrid_sparse.kernels.key_codes.reference import encode_keys, estimate_scores, score_deviation

SCALE = 0.125


@pytest.mark.parametrize("code_bits", [1, 2])
@pytest.mark.parametrize(("head_dim", "length"), [(64, 1.0), (128, 4.0)])
def test_errors_deviate_as_said(head_dim: int, length: float, code_bits: int) -> None:
    torch.manual_seed(head_dim)
    keys = length * torch.randn(40 * 16, head_dim)
    query = torch.randn(48, head_dim) * torch.linspace(0.5, 6, 48)[:, None]
    codes = encode_keys(keys, code_bits)
    exact = SCALE * query.double() @ keys.double().T
    errors = estimate_scores(query, codes, SCALE).flatten(1) - exact
    deviation = score_deviation(query, codes, SCALE)
    assert deviation.shape == (48,)
    # Sums of 640 errors of 48 queries, which share their keys.
    ratio = errors.square().mean(dim=1).sqrt() / deviation
    assert ((ratio - 1).abs() < 0.15).all()
    assert float(ratio.mean()) == pytest.approx(1, abs=0.03)


def test_the_first_pages_keys_stand_for_all() -> None:
    keys = torch.randn(20 * 16, 32)
    longer = torch.cat((keys[: 16 * 16], 9 * keys[16 * 16 :]))
    query = torch.randn(3, 32)
    of_first, of_all = (score_deviation(query, encode_keys(some, 2), SCALE) for some in (keys[: 16 * 16], longer))
    torch.testing.assert_close(of_all, of_first)
