"""Key codes that the device makes, and queries that it rotates, against their plain-torch references."""

import pytest
import torch
from torch import Tensor

from tests.kernels.served_layer import ServedLayer, Shape
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.key_codes.gpu import encode_pages, rotate_queries
from vllm_hybrid_sparse.kernels.key_codes.reference import (
    encode_keys,
    estimate_weights,
    pack_codes,
    rotation,
    unpack_codes,
)
from vllm_hybrid_sparse.memory.layout import TORCH_DTYPES, BlockLayout
from vllm_hybrid_sparse.values import summary_bytes

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
PAGES = 24
UNTOUCHED = 0xA5

cases = pytest.mark.parametrize(
    ("dtype", "head_dim", "code_bits"),
    [
        (torch.bfloat16, 16, 1),
        (torch.bfloat16, 16, 2),
        (torch.bfloat16, 64, 2),
        (torch.bfloat16, 80, 1),
        (torch.bfloat16, 128, 1),
        (torch.bfloat16, 128, 2),
        (torch.bfloat16, 256, 2),
        (torch.float16, 48, 1),
        (torch.float16, 96, 2),
        (torch.float16, 256, 1),
        (torch.float32, 32, 1),
        (torch.float32, 80, 2),
        (torch.float32, 128, 1),
        (torch.float32, 256, 2),
    ],
)


def random_keys(head_dim: int, dtype: torch.dtype = torch.float32, pages: int = PAGES) -> Tensor:
    """Keys about a mean that is not zero, as models have them."""
    return (torch.randn(16 * pages, head_dim) + 0.5 * torch.randn(head_dim)).to(dtype)


def host_of(keys: Tensor) -> tuple[Tensor, Tensor]:
    """A host store whose pages have these keys and values that are NaN, and where each page lies."""
    layout = BlockLayout(dtype=NAMES[keys.dtype], head_dim=keys.shape[1], block_tokens=len(keys), summary="none")
    host = layout.pack_reference(keys[:, None], torch.full_like(keys, torch.nan)[:, None])
    offsets = torch.arange(len(keys) // 16) * (layout.page_bytes // layout.element_bytes)
    return host, offsets


def on(device: torch.device, host: Tensor) -> Tensor:
    """Host memory as kernels of the device can read it."""
    return host.pin_memory() if device.type == "cuda" else host


def encode(keys: Tensor, code_bits: int, device: torch.device) -> Tensor:
    """The codes of these keys' pages as the device makes them, in their order; returned on the CPU."""
    host, offsets = host_of(keys)
    return encode_at(host, offsets, torch.arange(len(offsets)), len(offsets), keys.shape[1], code_bits, device)


def encode_at(
    host: Tensor, offsets: Tensor, places: Tensor, room: int, head_dim: int, code_bits: int, device: torch.device
) -> Tensor:
    size = summary_bytes("key_codes", head_dim, host.element_size(), code_bits)
    codes = torch.full((room, size), UNTOUCHED, dtype=torch.uint8, device=device)
    encode_pages(on(device, host), offsets.to(device), places.to(device), codes, head_dim=head_dim, code_bits=code_bits)
    return codes.cpu()


def check_codes(actual: Tensor, keys: Tensor, code_bits: int) -> None:
    """The reference's bytes but for a few: a float32 sum on the edge of two values, which then are neighbours."""
    head_dim = keys.shape[1]
    expected = pack_codes(encode_keys(keys, code_bits), keys.element_size())
    assert (actual != expected).sum() <= 0.002 * expected.numel()
    mine, wanted = (unpack_codes(one, head_dim, code_bits) for one in (actual, expected))
    assert torch.equal(pack_codes(mine, keys.element_size()), actual)  # no bit is set where the layout has none
    assert (mine.mean.int() - wanted.mean.int()).abs().max() <= 1
    assert (mine.factors.int() - wanted.factors.int()).abs().max() <= 1
    for unit, other in ((mine.mean_unit, wanted.mean_unit), (mine.factor_unit, wanted.factor_unit)):
        torch.testing.assert_close(unit, other, rtol=2**-7, atol=0)
    query = torch.randn(4, head_dim) / keys.float().std().clamp_min(1e-30)
    scale = head_dim**-0.5
    difference = (estimate_weights(query, mine, scale) - estimate_weights(query, wanted, scale)).abs()
    assert difference.max() <= 0.05
    assert (difference > 1e-9).double().mean() <= 0.1


@cases
def test_codes_are_the_reference_s_wherever_they_go(
    dtype: torch.dtype, head_dim: int, code_bits: int, device: torch.device
) -> None:
    keys = random_keys(head_dim, dtype)
    host, offsets = host_of(keys)
    places = torch.randperm(PAGES + 5)[:PAGES]
    codes = encode_at(host, offsets, places, PAGES + 5, head_dim, code_bits, device)
    check_codes(codes[places], keys, code_bits)
    others = torch.ones(PAGES + 5, dtype=torch.bool)
    others[places] = False
    assert (codes[others] == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code_bits", [1, 2])
def test_codes_are_the_native_core_s(dtype: torch.dtype, code_bits: int, device: torch.device) -> None:
    """Of the same host store: what lies in its blocks as summaries is what the device makes of their pages."""
    shape = Shape(dtype=dtype, head_dim=48, summary="key_codes", code_bits=code_bits)
    layer, layout = ServedLayer(shape, num_blocks=10), shape.layout
    request = layer.start()
    layer.step([(request, 9 * shape.block_tokens)], key_offset=0.5)
    host = layer.kv_cache.view(dtype)
    page = layout.page_bytes // layout.element_bytes
    in_block = torch.arange(shape.num_kv_heads * layout.pages_per_block) * page
    offsets = (torch.tensor(request.blocks)[:, None] * host.stride(0) + in_block).flatten()
    codes = encode_at(host.flatten(), offsets, torch.arange(len(offsets)), len(offsets), 48, code_bits, device)
    stored = torch.cat([layout.unpack(host[block], shape.num_kv_heads)[2].flatten(0, 1) for block in request.blocks])
    assert (codes != stored).sum() <= 0.002 * stored.numel()


def test_skipped_pages_leave_memory_as_it_is(device: torch.device) -> None:
    keys = random_keys(32, pages=4)
    host, offsets = host_of(keys)
    offsets[1] = -1
    codes = encode_at(host, offsets, torch.tensor([3, 0, -1, 1]), 4, 32, 2, device)
    check_codes(codes[[3, 1]], keys.view(4, 16, 32)[[0, 3]].flatten(0, 1), 2)
    assert (codes[[0, 2]] == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code_bits", [1, 2])
def test_keys_of_zeros(dtype: torch.dtype, code_bits: int, device: torch.device) -> None:
    """All of a page's, or a single token's."""
    keys = torch.zeros(32, 80, dtype=dtype)
    keys[16:20] = random_keys(80, dtype, pages=1)[:4]
    codes = encode(keys, code_bits, device)
    assert torch.equal(codes[0], pack_codes(encode_keys(keys[:16], code_bits))[0])
    check_codes(codes, keys, code_bits)


@pytest.mark.parametrize("code_bits", [1, 2])
def test_keys_that_are_all_the_same(code_bits: int, device: torch.device) -> None:
    """Nothing is left of them but what the levels of the mean round off."""
    keys = random_keys(64, torch.bfloat16, pages=6).view(6, 16, 64)[:, :1].expand(6, 16, 64).flatten(0, 1)
    check_codes(encode(keys, code_bits, device), keys, code_bits)


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_large_and_small_keys(size: float, device: torch.device) -> None:
    keys = size * random_keys(64, torch.bfloat16)
    check_codes(encode(keys, 2, device), keys, 2)


def test_a_token_a_thousand_times_as_long_as_the_others(device: torch.device) -> None:
    keys = random_keys(64, pages=6)
    keys[5::16] *= 1000
    check_codes(encode(keys, 2, device), keys, 2)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "q_heads"),
    [
        (torch.bfloat16, 16, 1),
        (torch.bfloat16, 128, 40),
        (torch.bfloat16, 256, 3),
        (torch.float16, 80, 16),
        (torch.float32, 48, 17),
        (torch.float32, 256, 8),
    ],
)
def test_queries_are_rotated_and_rounded(dtype: torch.dtype, head_dim: int, q_heads: int, device: torch.device) -> None:
    """Rows lie apart, as in a fused projection's output; in another row than the first a query is zeros."""
    whole = torch.randn(3, q_heads + 2, head_dim).to(dtype)
    whole[1, 1] = 0
    query = whole[:, 1:-1]
    levels, units, lengths = (part.cpu() for part in rotate_queries(whole.to(device)[:, 1:-1]))
    torch.testing.assert_close(lengths.double(), query.double().norm(dim=2), rtol=1e-5, atol=0)
    assert levels.dtype == torch.bfloat16
    assert not levels[1, 0].any()
    assert units[1, 0] == 0
    rotated = query.double() @ rotation(head_dim).T
    peaks = rotated.abs().amax(dim=2)
    torch.testing.assert_close(127 * units.double(), peaks, rtol=1e-6, atol=0)
    exact = torch.where(peaks[:, :, None] > 0, 127 * rotated / peaks[:, :, None], 0)
    assert torch.equal(levels.double(), levels.double().round())
    assert (levels.double() - exact).abs().max() <= 0.5 + 1e-4
    assert torch.equal(levels.abs().amax(dim=2).double(), torch.where(peaks > 0, 127.0, 0.0))


def test_no_pages_and_no_rows_are_no_work(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int64)
    codes = encode_at(torch.zeros(512), none, none, 2, 16, 2, device)
    assert (codes == UNTOUCHED).all()
    levels, units, lengths = rotate_queries(torch.empty(0, 4, 32, device=device))
    assert levels.shape == (0, 4, 32)
    assert units.shape == lengths.shape == (0, 4)


def test_bad_arguments_are_refused_by_name() -> None:
    host, offsets = torch.zeros(2048), torch.zeros(1, dtype=torch.int64)
    codes = torch.zeros(2, 192, dtype=torch.uint8)  # of 64 dims, one bit each
    good = {"host": host, "page_offsets": offsets, "places": offsets, "codes": codes, "head_dim": 64, "code_bits": 1}
    encode_pages(**good)
    for changed, message in (
        ({"host": host.double()}, "host=.*must be .* bfloat16 | float16 | float32"),
        ({"host": host.view(2, -1)}, r"host=\[2, 1024\]"),
        ({"page_offsets": offsets.int()}, "page_offsets=.*must be .* int64"),
        ({"places": offsets.expand(2).contiguous()}, r"places=\[2\]"),
        ({"codes": codes.short()}, "codes=.*must be .* uint8"),
        ({"codes": torch.zeros(2, 384, dtype=torch.uint8)[:, ::2]}, "codes=.*contiguous"),
        ({"codes": torch.zeros(400, dtype=torch.uint8)[1:385].view(2, 192)}, "codes=.*must be aligned to 16 bytes"),
        ({"code_bits": 2}, r"codes=.*must be \[any, 320\]"),
        ({"code_bits": 3}, "code_bits=3: must be 1 or 2"),
        ({"head_dim": 128}, r"codes=.*must be \[any, 384\]"),
        ({"head_dim": 72}, "head_dim=72"),
        ({"head_dim": 512}, "head_dim=512"),
    ):
        with pytest.raises(KernelError, match=message):
            encode_pages(**{**good, **changed})
    for query, message in (
        (torch.zeros(2, 4, 64).double(), "query=.*float64"),
        (torch.zeros(4, 64), r"query=\[4, 64\]"),
        (torch.zeros(2, 64, 4).transpose(1, 2), "query=.*its last dimensions contiguous"),
        (torch.zeros(2, 4, 24), "head_dim=24"),
    ):
        with pytest.raises(KernelError, match=message):
            rotate_queries(query)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_pageable_host_memory_is_refused() -> None:
    offsets = torch.zeros(1, dtype=torch.int64, device="cuda")
    codes = torch.zeros(1, 192, dtype=torch.uint8, device="cuda")
    with pytest.raises(KernelError, match="must be pinned"):
        encode_pages(torch.zeros(2048), offsets, offsets, codes, head_dim=64, code_bits=1)
