"""A large bias makes keys much longer than what tells them apart. What they have in common is not encoded."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.asked_once import asked_once
from tests.kernels.served_layer import Request, ServedLayer, Shape
from tests.kernels.step_checks import CODE_TIE
from vllm_hybrid_sparse.kernels.key_codes.reference import COMMON_KEY_PAGES, common_key, encode_keys, estimate_weights
from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import score_pages
from vllm_hybrid_sparse.runtime.loaded_blocks import LoadedBlocks
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec

BIAS = 150.0  # in eight pairs of dims of KV head 0, none in KV head 1. Its length is 424; Qwen2.5-7B has such layers
QUERY_BIAS = 10.0  # deviation of what is added to queries in these dims
TURN = 2.4e-4  # by which rotary embeddings turn these pairs, radians a token: pair 58 of 64 at a base of 10,000
TOPICS, TOPIC_TOKENS = 40, 32  # number of topics of the keys, and the tokens of each stay with one
STRETCH = 16 * COMMON_KEY_PAGES
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


def biased(shape: Shape, tokens: int, first: int) -> Tensor:
    """Queries, keys and values of some tokens from position `first` on."""
    generator = torch.Generator().manual_seed(first)
    width = shape.num_q_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(tokens, width, shape.head_dim, generator=generator)
    about = torch.randint(TOPICS, (tokens // TOPIC_TOKENS + 1,), generator=generator).repeat_interleave(TOPIC_TOKENS)
    qkv[:, shape.num_q_heads] += topics(shape)[about[:tokens]]
    angles, half = TURN * torch.arange(first, first + tokens)[:, None], shape.head_dim // 2
    qkv[:, shape.num_q_heads, half - 8 : half] += BIAS * angles.cos()
    qkv[:, shape.num_q_heads, -8:] += BIAS * angles.sin()
    return qkv


def topics(shape: Shape) -> Tensor:
    """A direction for each topic, [topics, head_dim]."""
    return 1.5 * torch.randn(TOPICS, shape.head_dim, generator=torch.Generator().manual_seed(0))


def served(shape: Shape, tokens: int) -> tuple[ServedLayer, Request]:
    """A layer and its request, which came in chunks and token by token."""
    layer = ServedLayer(shape, num_blocks=(tokens + 200) // shape.block_tokens)
    request = layer.start()
    for count in (9, 700, 3, *([1] * 30), tokens - 742):
        layer.step([(request, count)], tokens=biased(shape, count, len(request.key)))
    return layer, request


def expected_weights(query: Tensor, keys: Tensor, code_bits: int, scale: float) -> Tensor:
    """Weights that the reference expects for the pages of one KV head, stretch by stretch."""
    weights = []
    for begin in range(0, len(keys), STRETCH):
        stretch = keys[begin : begin + STRETCH]
        common = common_key(stretch[:16])
        less = stretch.float() - (0.0 if common is None else common)
        of_common = 0.0 if common is None else scale * query.double() @ common.double()
        estimated = estimate_weights(query, encode_keys(less, code_bits), scale)
        weights.append(estimated + torch.as_tensor(of_common).reshape(-1, 1))
    return torch.cat(weights, dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("code_bits", "threads"), [(1, 1), (2, 3)])
def test_scores_are_those_of_keys_less_what_they_have_in_common(
    isa: str, dtype: torch.dtype, code_bits: int, threads: int
) -> None:
    codes: dict[str, Any] = {"summary": "key_codes", "code_bits": code_bits, "common_keys": True}
    shape = Shape(num_q_heads=6, dtype=dtype, isa=isa, num_threads=threads, **codes)
    layer, request = served(shape, 1710)
    query = layer.random(6, 64)
    table = torch.tensor(request.blocks, dtype=torch.int32)
    assert [common_key(request.key[:16, head]) is None for head in (0, 1)] == [False, True]
    for first, end in ((0, 106), (7, 9), (30, 70)):
        scores = score_pages(layer.attention, query, layer.kv_cache, table, first, end)
        for kv_head in (0, 1):
            heads = slice(3 * kv_head, 3 * kv_head + 3)
            keys = request.key[: 16 * 106, kv_head]
            expected = asked_once(expected_weights, query[heads], keys, shape.code_bits, shape.scale)[:, first:end]
            torch.testing.assert_close(scores[heads].double(), expected, rtol=1e-5, atol=CODE_TIE)


def kept(common_keys: bool) -> Tensor:
    """Share of its attention weight that a decode step at 0.95 reads, [steps, heads of KV head 0]."""
    shape = Shape(num_q_heads=6, head_dim=128, scale=128**-0.5, summary="key_codes", common_keys=common_keys)
    layer, request = served(shape, 4000)
    retained = RetainedSet(sink_tokens=16, window_tokens=32)
    selection = SelectionSpec(ranked=True, threshold=0.95, estimated_remainder=True)
    shares = []
    for index in range(6):
        tokens = biased(shape, 1, len(request.key))
        tokens[:, :6] = layer.random(1, 6, 128) + 2 * topics(shape)[6 * index : 6 * index + 6]
        tokens[:, :6, 56:64] += QUERY_BIAS * layer.random(8)
        tokens[:, :6, -8:] += QUERY_BIAS * layer.random(8)
        step = layer.step([(request, 1)], tokens=tokens, selection=selection, retained=retained)
        pages = [*layer.attention.last_plan(0, 0), *retained.retained_pages(len(request.key))]
        weights = (shape.scale * step.query[0, :3].float() @ request.key[:, 0].float().T).softmax(dim=1)
        by_page = torch.nn.functional.pad(weights, (0, -weights.shape[1] % 16)).unflatten(1, (-1, 16)).sum(dim=2)
        shares.append(by_page[:, pages].sum(dim=1))
    return torch.stack(shares)


def test_a_threshold_keeps_its_promise_for_long_keys() -> None:
    assert kept(common_keys=True).min() > 0.9
    assert kept(common_keys=False).min() < 0.6, "the case is not tested"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_changes_where_keys_have_little_in_common(dtype: torch.dtype) -> None:
    caches = []
    for common_keys in (True, False):
        layer = ServedLayer(Shape(dtype=dtype, summary="key_codes", common_keys=common_keys), num_blocks=60, seed=3)
        request = layer.start()
        for tokens in (900, 1, 1, 300):
            layer.step([(request, tokens)], key_offset=1.0)
        caches.append(layer.kv_cache)
    assert torch.equal(*caches)


def test_summaries_that_are_made_anew_are_less_it_too() -> None:
    """The case: a KV connector loads two sequences that share their first blocks."""
    layer, first = served(Shape(num_q_heads=6, summary="key_codes", common_keys=True, num_threads=2), 1710)
    second = Request(first.key[:768], first.value[:768], first.blocks[:24])
    layer.step([(second, 150)], tokens=biased(layer.shape, 150, 5000))
    before = layer.kv_cache.clone()
    layout, kv_heads = layer.attention.layout, layer.shape.num_kv_heads
    whole = [request.blocks[: len(request.key) // layer.shape.block_tokens] for request in (first, second)]
    layer.kv_cache[:, kv_heads * layout.pages_per_block * layout.page_bytes :] = 0x5A
    loaded = LoadedBlocks.of(whole)
    assert loaded is not None
    layer.attention.summarize(layer.kv_cache, loaded.blocks, loaded.starts)
    for blocks in whole:
        assert torch.equal(layer.kv_cache[blocks], before[blocks])
    tail = torch.tensor(whole[0][20:], dtype=torch.int32)
    layer.attention.summarize(layer.kv_cache, tail)  # as if a sequence began with these blocks
    assert not torch.equal(layer.kv_cache[whole[0]], before[whole[0]]), "the case is not tested"
    assert LoadedBlocks.of([[]]) is None
