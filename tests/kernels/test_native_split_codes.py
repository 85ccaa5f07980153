"""Split codes are key codes stored in other places: what is stored, what is scored, and how little is read."""

import pytest
import torch

from tests.kernels.asked_once import asked_once
from tests.kernels.fluxion_checks import MirroredFluxion, constant_predictor
from tests.kernels.served_layer import ServedLayer, Shape
from tests.tolerances import CODE_TIE
from vllm_hybrid_sparse.errors import ConfigError, KernelError
from vllm_hybrid_sparse.kernels.fluxion.reference import LISTED_BLOCKS, LISTED_MORE
from vllm_hybrid_sparse.kernels.key_codes.reference import (
    encode_keys,
    estimate_scores,
    estimate_weights,
    pack_codes,
    pack_split_codes,
    signs_of,
)
from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import score_pages
from vllm_hybrid_sparse.memory.layout import BlockLayout
from vllm_hybrid_sparse.values import SPLIT_HEAD_DIM, RetainedSet, SelectionSpec, fine_bytes, summary_bytes

RETAINED = RetainedSet(sink_tokens=16, window_tokens=32)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("block_tokens", [16, 128])
def test_stored_codes_are_the_reference_s(isa: str, dtype: torch.dtype, head_dim: int, block_tokens: int) -> None:
    shape = Shape(isa=isa, dtype=dtype, head_dim=head_dim, block_tokens=block_tokens, summary="split_codes")
    layer = ServedLayer(shape, num_blocks=6 * 128 // block_tokens)
    request = layer.start()
    for count in (300, 1, 3, 13, 11):  # pages filled at once, and token by token
        layer.step([(request, count)], key_offset=0.5)
    differing = total = 0
    for index, block in enumerate(request.blocks):
        key, value, stored = shape.layout.unpack(layer.kv_cache[block], shape.num_kv_heads)
        tokens = request.key[index * block_tokens :][:block_tokens]
        assert torch.equal(key[: len(tokens)], tokens)
        assert torch.equal(value[: len(tokens)], request.value[index * block_tokens :][:block_tokens])
        full_pages = len(tokens) // 16
        for head in range(shape.num_kv_heads if full_pages else 0):
            codes = asked_once(encode_keys, tokens[: 16 * full_pages, head], 2)
            expected = torch.cat(asked_once(pack_split_codes, codes), dim=1)
            differing += int((stored[head, : len(expected)] != expected).sum())
            total += expected.numel()
    assert differing <= 0.002 * total  # a float32 sum on the edge of two codes


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("head_dim", "block_tokens"), [(32, 16), (64, 128), (96, 32)])
def test_what_is_packed_is_unpacked(dtype: str, head_dim: int, block_tokens: int) -> None:
    layout = BlockLayout(dtype=dtype, head_dim=head_dim, block_tokens=block_tokens, summary="split_codes")
    key, value = torch.randn(2, block_tokens, 3, head_dim).to(layout.torch_dtype)
    block = layout.pack_reference(key, value)
    assert block.numel() * block.element_size() == 3 * layout.head_block_bytes
    unpacked_key, unpacked_value, summaries = layout.unpack(block, 3)
    assert torch.equal(unpacked_key, key)
    assert torch.equal(unpacked_value, value)
    for head in range(3):
        assert torch.equal(summaries[head], torch.cat(pack_split_codes(encode_keys(key[:, head], 2)), dim=1))


@pytest.mark.parametrize("head_dim", range(SPLIT_HEAD_DIM, 513, SPLIT_HEAD_DIM))
def test_two_parts_take_the_bytes_of_one_piece(head_dim: int) -> None:
    size = summary_bytes("split_codes", head_dim, 2, 2)
    codes = encode_keys(torch.randn(16, head_dim), 2)
    coarse, fine = pack_split_codes(codes)
    assert coarse.shape[1] == summary_bytes("key_codes", head_dim, 2, 1)
    assert fine.shape[1] == fine_bytes("split_codes", head_dim)
    assert (
        coarse.shape[1] + fine.shape[1]
        == size
        == summary_bytes("key_codes", head_dim, 4, 2)  # in whole lines
        == len(pack_codes(codes, element_bytes=4)[0])
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
def test_both_bits_weigh_as_codes_in_one_piece(isa: str, threads: int, head_dim: int) -> None:
    shape = Shape(num_q_heads=6, head_dim=head_dim, summary="split_codes", isa=isa, num_threads=threads)
    layer = ServedLayer(shape, num_blocks=150)
    request = layer.start()
    layer.step([(request, 4500)], attend=False)
    table = torch.tensor(request.blocks, dtype=torch.int32)
    query = layer.random(6, head_dim)
    for first, end in ((0, 281), (3, 150), (7, 7)):
        scores = score_pages(layer.attention, query, layer.kv_cache, table, first, end)
        for kv_head in (0, 1):
            keys, heads = request.key[16 * first : 16 * end, kv_head], slice(3 * kv_head, 3 * kv_head + 3)
            expected = asked_once(estimate_weights, query[heads], asked_once(encode_keys, keys, 2), shape.scale)
            torch.testing.assert_close(scores[heads].double(), expected, rtol=0, atol=CODE_TIE)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_signs_estimate_without_much_bias(head_dim: int) -> None:
    """The constant that stands for each key's own factor is right for normally distributed keys."""
    keys, query = torch.randn(4096, head_dim), torch.randn(8, head_dim)
    exact = (query @ keys.T).double()
    by_signs = estimate_scores(query, signs_of(encode_keys(keys, 2)), 1.0).flatten(1)
    one_bit = estimate_scores(query, encode_keys(keys, 1), 1.0).flatten(1)
    slope = (by_signs * exact).sum() / exact.square().sum()
    assert abs(slope - 1) < 0.02
    error, own = ((estimate - exact).square().mean() for estimate in (by_signs, one_bit))
    assert error < 1.05 * own


def test_of_a_long_sequence_little_is_read_whole() -> None:
    shape = Shape(num_q_heads=6, head_dim=64, block_tokens=16, summary="split_codes", num_threads=2)
    mirror = MirroredFluxion(shape, constant_predictor(0.01), RETAINED, granularity=16, num_blocks=260, attributed=0.5)
    request = mirror.start()
    mirror.step((request, 4000))
    mirror.layer.attention.reset_stats()
    mirror.step((request, 1))
    stats = mirror.layer.attention.stats()
    candidates = len(range(*RETAINED.candidate_range(4001)))
    coarse = stats.summaries_scored * (320 - 128)
    assert stats.summaries_scored == 2 * candidates
    fine_parts, rest = divmod(stats.summary_bytes - coarse, 128)
    assert rest == 0
    selected = max(mirror.steps[0].budgets.blocks.flatten().tolist())  # type: ignore[union-attr]
    listed = LISTED_BLOCKS * selected + LISTED_MORE
    assert 2 * listed <= fine_parts <= 6 * listed < candidates
    assert not mirror.excuses


def test_what_split_codes_are_not_for_is_refused() -> None:
    with pytest.raises(KernelError, match="needs code_bits=2, not 1, and a head_dim that is a multiple of 32, not 64"):
        ServedLayer(Shape(summary="split_codes", code_bits=1), num_blocks=1)
    with pytest.raises(KernelError, match="a multiple of 32, not 80"):
        ServedLayer(Shape(summary="split_codes", head_dim=80), num_blocks=1)
    with pytest.raises(ConfigError, match="head_dim=80: split codes need a multiple of 32"):
        BlockLayout(dtype="f32", head_dim=80, block_tokens=16, summary="split_codes")
    with pytest.raises(ConfigError, match="code_bits=1: split codes have 2"):
        BlockLayout(dtype="f32", head_dim=64, block_tokens=16, summary="split_codes", code_bits=1)
    layer = ServedLayer(Shape(summary="split_codes"), num_blocks=4)
    with pytest.raises(KernelError, match="summary=split_codes: ranked by fluxion alone"):
        layer.step([(layer.start(), 40)], selection=SelectionSpec(ranked=True, max_pages=2))
