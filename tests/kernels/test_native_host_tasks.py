"""The native core's parts of a decode row, one at a time."""

import itertools

import pytest
import torch

from tests.kernels.asked_once import asked_once
from tests.kernels.served_layer import Request, ServedLayer, Shape
from tests.tolerances import CODE_TIE, SCORE_TIE, assert_close
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.key_codes.reference import encode_keys, estimate_weights
from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import attend_pages, score_pages
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch
from vllm_hybrid_sparse.kernels.score.reference import score_pages as reference_scores
from vllm_hybrid_sparse.kernels.sparse_attention.reference import attend_pages as reference_attention
from vllm_hybrid_sparse.kernels.summarize.reference import summarize_pages
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec


def served(shape: Shape, tokens: int) -> tuple[ServedLayer, Request, torch.Tensor, torch.Tensor]:
    """A layer with one request, its block table and a query."""
    layer = ServedLayer(shape, num_blocks=tokens // shape.block_tokens + 8)
    request = layer.start()
    layer.step([(request, tokens)], attend=False)
    return (
        layer,
        request,
        torch.tensor(request.blocks, dtype=torch.int32),
        layer.random(shape.num_q_heads, shape.head_dim),
    )


@pytest.mark.parametrize(("heads", "head_dim", "threads"), [(3, 64, 1), (3, 64, 3), (20, 80, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_group_attends_to_the_pages_that_are_named(
    isa: str, dtype: torch.dtype, heads: int, head_dim: int, threads: int
) -> None:
    shape = Shape(dtype=dtype, num_q_heads=2 * heads, head_dim=head_dim, isa=isa, num_threads=threads)
    layer, request, table, query = served(shape, 1003)
    assert layer.attention.isa == isa
    for kv_head, pages in itertools.product((0, 1), ([62], [0], [5, 3, 62, 8], list(range(63)), [])):
        group = query[heads * kv_head :][:heads]
        listed = torch.tensor(pages, dtype=torch.int32)
        state = attend_pages(layer.attention, group, layer.kv_cache, table, kv_head, listed, 1003)
        key, value = request.key[:, kv_head], request.value[:, kv_head]
        out, lse = asked_once(reference_attention, group, key, value, pages, shape.scale)
        assert_close(state.out, out.nan_to_num(), dtype)
        if not pages:
            assert state.lse.tolist() == [-torch.inf] * heads
            assert state.lightest_lse.tolist() == [torch.inf] * heads
            continue
        by_page = [asked_once(reference_attention, group, key, value, [page], shape.scale)[1] for page in pages]
        torch.testing.assert_close(state.lse.double(), lse, rtol=0, atol=2e-2 if dtype != torch.float32 else 1e-4)
        lightest = torch.stack(by_page).amin(dim=0)
        torch.testing.assert_close(
            state.lightest_lse.double(), lightest, rtol=0, atol=2e-2 if dtype != torch.float32 else 1e-4
        )


@pytest.mark.parametrize(
    ("dtype", "heads", "threads"), [(torch.float32, 3, 1), (torch.float32, 3, 3), (torch.bfloat16, 20, 1)]
)
def test_scores_of_tokens_are_kept_where_they_are_wanted(
    isa: str, dtype: torch.dtype, heads: int, threads: int
) -> None:
    """The pages come in any order, the last one is partly filled. Attention is the same as without scores."""
    shape = Shape(dtype=dtype, num_q_heads=2 * heads, isa=isa, num_threads=threads)
    layer, request, table, query = served(shape, 1003)
    pages = torch.tensor([62, 5, *range(8, 50)], dtype=torch.int32)
    scores = torch.empty(heads, len(pages) * 16)
    group = query[heads:]
    plain, kept = (
        attend_pages(layer.attention, group, layer.kv_cache, table, 1, pages, 1003, wanted) for wanted in (None, scores)
    )
    assert_close(kept.out, plain.out)
    assert_close(kept.lse, plain.lse)
    by_page = scores.unflatten(1, (len(pages), 16))
    for place, page in enumerate(pages.tolist()):
        key = request.key[16 * page : 16 * page + 16, 1]
        assert_close(by_page[:, place, : len(key)], shape.scale * group.float() @ key.float().T)
    rule = rf"token_scores=\[{heads}, 16\] float32 on cpu, .* must be \[{heads}, 704\] float32 on cpu, contiguous"
    with pytest.raises(KernelError, match=rule):
        attend_pages(layer.attention, group, layer.kv_cache, table, 1, pages, 1003, torch.empty(heads, 16))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("summary", ["minmax", "cuboid_mean", "key_codes"])
def test_scores_are_those_of_the_references(isa: str, summary: str, threads: int) -> None:
    shape = Shape(num_q_heads=6, summary=summary, isa=isa, num_threads=threads)
    layer, request, table, query = served(shape, 1003)
    for first, end in ((0, 62), (4, 5), (7, 61), (3, 3)):
        scores = score_pages(layer.attention, query, layer.kv_cache, table, first, end)
        assert scores.shape == (6, end - first)
        for head in range(6):
            keys, one = request.key[16 * first : 16 * end, head // 3], query[head : head + 1]
            if summary == "key_codes":
                expected = estimate_weights(one, encode_keys(keys, 2), shape.scale)
            else:
                expected = reference_scores(one, summarize_pages(keys, summary), shape.scale, summary)
            tie = CODE_TIE if summary == "key_codes" else SCORE_TIE
            torch.testing.assert_close(scores[head].double(), expected[0], rtol=0, atol=tie)


@pytest.mark.parametrize("summary", ["minmax", "cuboid_mean"])
@pytest.mark.parametrize(
    ("stored", "kv_heads", "group", "head_dim"),
    [
        (torch.bfloat16, 1, 1, 64),
        (torch.bfloat16, 2, 3, 64),
        (torch.bfloat16, 4, 4, 64),
        (torch.bfloat16, 3, 4, 128),
        (torch.bfloat16, 2, 8, 96),
        (torch.bfloat16, 1, 16, 32),
        (torch.bfloat16, 1, 17, 64),
        (torch.bfloat16, 3, 9, 512),
        (torch.bfloat16, 2, 5, 80),
        (torch.float8_e4m3fn, 2, 5, 64),
    ],
)
def test_scores_of_many_pages_are_those_of_the_references_wherever_blocks_are_cut(
    isa: str, stored: torch.dtype, kv_heads: int, group: int, head_dim: int, summary: str
) -> None:
    """With AMX a block of eight pages is a tile. Rows, heads and dims that do not fit tiles are among these."""
    shape = Shape(
        dtype=stored,
        num_q_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=128,
        summary=summary,
        isa=isa,
        scale=head_dim**-0.5,
    )
    layer, request, table, query = served(shape, 700)
    summaries = [summarize_pages(request.key[: 16 * 43, head], summary) for head in range(kv_heads)]
    groups = zip(query.split(group), summaries, strict=True)
    expected = torch.cat([reference_scores(rows, of_head, shape.scale, summary) for rows, of_head in groups])
    for first, end in ((0, 43), (8, 40), (3, 41), (7, 39), (1, 32), (5, 6)):
        scores = score_pages(layer.attention, query, layer.kv_cache, table, first, end)
        torch.testing.assert_close(scores.double(), expected[:, first:end], rtol=0, atol=SCORE_TIE)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("code_bits", [1, 2])
def test_scores_of_key_codes_over_many_pages_are_the_reference_s(isa: str, code_bits: int, threads: int) -> None:
    """The kernel scores 128 pages at a time."""
    shape = Shape(num_q_heads=6, summary="key_codes", code_bits=code_bits, isa=isa, num_threads=threads)
    layer, request, table, query = served(shape, 4500)
    for first, end in ((0, 281), (3, 150)):
        scores = score_pages(layer.attention, query, layer.kv_cache, table, first, end)
        for kv_head in (0, 1):
            keys, heads = request.key[16 * first : 16 * end, kv_head], slice(3 * kv_head, 3 * kv_head + 3)
            codes = asked_once(encode_keys, keys, code_bits)
            expected = asked_once(estimate_weights, query[heads], codes, shape.scale)
            torch.testing.assert_close(scores[heads].double(), expected, rtol=0, atol=CODE_TIE)


def test_a_row_of_length_zero_is_stored_and_not_attended() -> None:
    layer, request, table, query = served(Shape(), 47)
    key, value = layer.random(1, 2, 64), layer.random(1, 2, 64)
    output = torch.full((1, 4, 64), 7.0)
    batch = NativeBatch.from_tensors(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        table[None],
        torch.tensor([request.blocks[1] * 32 + 15]),
        torch.ones(1, dtype=torch.bool),
    )
    layer.attention.forward(query[None], key, value, layer.kv_cache, batch, SelectionSpec(), RetainedSet(), output)
    assert output.eq(7.0).all()
    pages = torch.tensor([2], dtype=torch.int32)
    state = attend_pages(layer.attention, query[:2], layer.kv_cache, table, 0, pages, 48)
    keys, values = torch.cat((request.key, key))[:, 0], torch.cat((request.value, value))[:, 0]
    assert_close(state.out, reference_attention(query[:2], keys, values, [2], 0.125)[0])


def test_what_does_not_fit_is_refused() -> None:
    layer, _, table, query = served(Shape(), 64)
    attention, cache = layer.attention, layer.kv_cache
    pages = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(KernelError, match=r"pages=0 to 4: must lie in 2 blocks"):
        attend_pages(attention, query[:2], cache, table, 0, pages, 64)
    with pytest.raises(KernelError, match=r"pages=\[2\] int64 on cpu, .* must be \[any\] int32 on cpu"):
        attend_pages(attention, query[:2], cache, table, 0, pages.long(), 64)
    with pytest.raises(KernelError, match="kv_head=2"):
        attend_pages(attention, query[:2], cache, table, 2, pages[:1], 64)
    with pytest.raises(KernelError, match=r"query=\[4, 64\] \w+ on cpu, .* must be \[2, 64\]"):
        attend_pages(attention, query, cache, table, 0, pages[:1], 64)
    with pytest.raises(KernelError, match=r"block_table=\[\d\] int64 on cpu, .* must be \[any\] int32 on cpu"):
        score_pages(attention, query, cache, table.long(), 0, 1)
    with pytest.raises(KernelError, match="first_page=0 end_page=5: must be pages of 2 blocks"):
        score_pages(attention, query, cache, table, 0, 5)
    bare, _, table, query = served(Shape(summary="none"), 64)
    with pytest.raises(KernelError, match="there is nothing to score"):
        score_pages(bare.attention, query, bare.kv_cache, table, 0, 1)
