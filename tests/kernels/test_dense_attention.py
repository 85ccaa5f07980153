"""Attention to contiguous tokens by torch's fused kernels, against the plain formula."""

import pytest
import torch

from tests.tolerances import assert_close
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.dense_attention import library, reference


def made(q_heads: int, kv_heads: int, rows: int, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Query, key and value as a model hands them over: heads of a token side by side."""
    torch.manual_seed(rows + tokens)
    query, key, value = (
        torch.randn(count, heads, 32).to(dtype).transpose(0, 1)
        for count, heads in ((rows, q_heads), (tokens, kv_heads), (tokens, kv_heads))
    )
    return query, key, value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (3, 1), (8, 2)])
@pytest.mark.parametrize(("rows", "tokens", "causal"), [(1, 1, True), (1, 40, False), (17, 17, True), (33, 5, False)])
def test_both_give_the_same(
    q_heads: int, kv_heads: int, rows: int, tokens: int, causal: bool, dtype: torch.dtype
) -> None:
    parts = made(q_heads, kv_heads, rows, tokens, dtype)
    out, lse = library.attend_dense(*parts, scale=0.2, causal=causal)
    wanted_out, wanted_lse = reference.attend_dense(*parts, scale=0.2, causal=causal)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    assert_close(out, wanted_out, dtype)
    assert_close(lse, wanted_lse, dtype)


def test_a_row_sees_no_token_behind_its_own() -> None:
    query, key, value = made(4, 2, 20, 20, torch.float32)
    before, _ = library.attend_dense(query, key, value, scale=0.2, causal=True)
    value = value.clone()
    value[:, 10:] += 100
    after, _ = library.attend_dense(query, key, value, scale=0.2, causal=True)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10], after[:, 10])


@pytest.mark.parametrize("attend_dense", [library.attend_dense, reference.attend_dense])
def test_no_token_gives_an_empty_state(attend_dense: object) -> None:
    query, key, value = made(4, 2, 3, 0, torch.float32)
    out, lse = attend_dense(query, key, value, scale=0.2, causal=False)  # type: ignore[operator]
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()


def test_the_causal_rule_needs_as_many_rows_as_tokens() -> None:
    query, key, value = made(4, 2, 3, 5, torch.float32)
    with pytest.raises(KernelError, match="rows=3: must be the 5 tokens"):
        library.attend_dense(query, key, value, scale=0.2, causal=True)
