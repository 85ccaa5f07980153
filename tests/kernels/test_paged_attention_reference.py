"""The whole-batch reference: exact rows are causal attention, decode rows follow the policy."""

import pytest
import torch

from tests.tolerances import assert_close
from vllm_hybrid_sparse.kernels.paged_attention.reference import causal_attention, paged_attention
from vllm_hybrid_sparse.kernels.progressive.reference import progressive_attention
from vllm_hybrid_sparse.policy.selectors import SpecSelector
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec

RETAINED = RetainedSet(sink_tokens=16, window_tokens=32)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (5, 5), (1, 40), (17, 40)])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (6, 2), (8, 1)])
def test_causal_attention_row_by_row(rows: int, tokens: int, q_heads: int, kv_heads: int) -> None:
    query = torch.randn(rows, q_heads, 16)
    key, value = torch.randn(2, tokens, kv_heads, 16).double()
    out = causal_attention(query, key, value, 0.4)
    for row in range(rows):
        for head in range(q_heads):
            kv_head = head // (q_heads // kv_heads)
            seen = tokens - rows + row + 1
            weights = (0.4 * key[:seen, kv_head] @ query[row, head].double()).softmax(0)
            assert_close(out[row, head], weights @ value[:seen, kv_head])


def test_dense_decoding_equals_the_last_row_of_causal_attention() -> None:
    lens = [1, 17, 200]
    keys = [torch.randn(n, 2, 16) for n in lens]
    values = [torch.randn(n, 2, 16) for n in lens]
    query = torch.randn(3, 6, 16)
    result = paged_attention(
        query,
        keys,
        values,
        query_lens=[1, 1, 1],
        decode_mask=[True, True, True],
        selector=SpecSelector(SelectionSpec()),
        retained=RETAINED,
        scale=0.25,
        summary="minmax",
    )
    for row in range(3):
        assert_close(result.out[row], causal_attention(query[row : row + 1], keys[row], values[row], 0.25)[0])


def test_a_mixed_batch_gives_each_request_what_it_gets_alone() -> None:
    seq_lens, query_lens, decode_mask = [100, 300, 7, 200, 50], [20, 1, 7, 1, 0], [False, True, False, True, False]
    keys = [torch.randn(n, 2, 16) for n in seq_lens]
    values = [torch.randn(n, 2, 16) for n in seq_lens]
    query = torch.randn(sum(query_lens), 4, 16)
    selector = SpecSelector(SelectionSpec(ranked=True, max_pages=2))
    result = paged_attention(
        query,
        keys,
        values,
        query_lens=query_lens,
        decode_mask=decode_mask,
        selector=selector,
        retained=RETAINED,
        scale=0.25,
        summary="cuboid_mean",
    )
    assert_close(result.out[:20], causal_attention(query[:20], keys[0], values[0], 0.25))
    assert_close(result.out[21:28], causal_attention(query[21:28], keys[2], values[2], 0.25))
    assert len(result.groups) == 2
    for row, request, groups in ((20, 1, result.groups[0]), (28, 3, result.groups[1])):
        for kv_head in range(2):
            heads = slice(2 * kv_head, 2 * kv_head + 2)
            alone = progressive_attention(
                query[row, heads],
                keys[request][:, kv_head],
                values[request][:, kv_head],
                selector=selector,
                retained=RETAINED,
                scale=0.25,
                summary="cuboid_mean",
            )
            assert groups[kv_head].pages == alone.pages
            assert len(alone.pages) == 2
            assert_close(result.out[row, heads], alone.out)
