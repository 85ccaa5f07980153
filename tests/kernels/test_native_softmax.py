"""Attention weights are right to the last bits of their dtype, from the heaviest token's to one of e^-80 of it."""

import pytest
import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec

TOKENS = 509  # neither whole pages nor whole chunks of four
HEAD_DIM = 16
BLOCK_TOKENS = 16
# The relative error allowed, and the least weight that the dtype can hold that exactly. In float32 a score of 80 is
# wrong by up to 4e-6, and so is its exponential; bf16 rounds weights and outputs.
TOLERANCES = {torch.float32: (5e-6, 1e-36), torch.float16: (2**-10, 1e-4), torch.bfloat16: (5.5e-3, 1e-36)}


def one_step(query: Tensor, key: Tensor, value: Tensor, isa: str, query_len: int) -> Tensor:
    """Attend the last `query_len` tokens of one request exactly; [query_len, q_heads, HEAD_DIM]."""
    blocks = -(-TOKENS // BLOCK_TOKENS)
    attention = NativeAttention(
        dtype=key.dtype, num_q_heads=query.shape[1], num_kv_heads=1, head_dim=HEAD_DIM,
        block_tokens=BLOCK_TOKENS, scale=1.0, isa=isa,
    )  # fmt: skip
    cache = torch.zeros(blocks, attention.layout.head_block_bytes, dtype=torch.uint8)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    for first, count in ((0, TOKENS - query_len), (TOKENS - query_len, query_len)):
        batch = NativeBatch.from_tensors(
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([first + count], dtype=torch.int32),
            block_table=table,
            slot_mapping=torch.arange(first, first + count),
            decode_mask=torch.tensor([count == 1]),
        )
        rows = slice(first, first + count)
        output = torch.empty(count, *query.shape[1:], dtype=key.dtype)
        attention.forward(
            query[rows], key[rows], value[rows], cache, batch, SelectionSpec(), RetainedSet(sink_tokens=16), output
        )
    return output


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("order", ["heaviest first", "heaviest last", "shuffled"])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_light_weights_are_as_accurate_as_heavy_ones(isa: str, dtype: torch.dtype, order: str, heads: int) -> None:
    gaps = torch.arange(TOKENS) * 160 // TOKENS * 0.5  # 0 to 79.5, which bf16 holds exactly
    kinds = torch.arange(TOKENS) * HEAD_DIM // TOKENS  # each kind has an output dim of its own
    indices = {"heaviest first": torch.arange(TOKENS), "heaviest last": torch.arange(TOKENS).flip(0)}
    at = indices.get(order, torch.randperm(TOKENS))
    key = torch.zeros(TOKENS, 1, HEAD_DIM)
    key[:, 0, 0] = -gaps[at]
    value = torch.nn.functional.one_hot(kinds[at], HEAD_DIM)[:, None].float()
    query = torch.zeros(TOKENS, heads, HEAD_DIM)
    factors = 2.0 ** -torch.arange(heads)
    query[:, :, 0] = factors
    rtol, least = TOLERANCES[dtype]
    for query_len in (1, 5):
        output = one_step(query.to(dtype), key.to(dtype), value.to(dtype), isa, query_len)
        for row in range(query_len):
            seen = TOKENS - query_len + row + 1
            weights = torch.softmax(factors.double()[:, None] * key[:seen, 0, 0].double(), dim=1)
            expected = weights @ value[:seen, 0].double()
            held = expected > least
            torch.testing.assert_close(output[row].double()[held], expected[held], rtol=rtol, atol=0.0)
