"""Where the elements of a block lie."""

import itertools

import pytest
import torch

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.kernels.summarize.reference import summarize_pages
from vllm_hybrid_sparse.memory.layout import STORED_DTYPES, BlockLayout
from vllm_hybrid_sparse.values import CODE_BITS, MAX_HEAD_DIM, PAGE_TOKENS, SUMMARY_VECTORS, summary_bytes

LAYOUTS = [
    BlockLayout(dtype=dtype, head_dim=head_dim, block_tokens=block_tokens, summary=summary)
    for dtype in STORED_DTYPES
    for head_dim, block_tokens in ((16, 16), (80, 32), (128, 128))
    for summary in ("minmax", "cuboid_mean")
]


KV_HEADS = 3


def random_block(layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = torch.randn(2, layout.block_tokens, KV_HEADS, layout.head_dim).to(layout.torch_dtype)
    return key, value


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_packed_is_unpacked(layout: BlockLayout) -> None:
    key, value = random_block(layout)
    block = layout.pack_reference(key, value)
    assert block.numel() * block.element_size() == KV_HEADS * layout.head_block_bytes
    for storage in (block, block.view(torch.uint8), block.view(torch.int16)):
        unpacked_key, unpacked_value, summaries = layout.unpack(storage, KV_HEADS)
        assert torch.equal(unpacked_key, key.to(layout.row_dtype))
        assert torch.equal(unpacked_value, value.to(layout.row_dtype))
        for head in range(KV_HEADS):
            assert torch.equal(summaries[head], summarize_pages(key[:, head].to(layout.row_dtype), layout.summary))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_element_lies_where_the_layout_says(layout: BlockLayout) -> None:
    key, value = random_block(layout)
    block, d = layout.pack_reference(key, value), layout.head_dim
    for head, token in itertools.product(range(KV_HEADS), (0, 1, 15, layout.block_tokens - 1)):
        page, lane = divmod(token, 16)
        page_at = (head * layout.pages_per_block + page) * 32 * d
        for dim in (0, 1, 2, d - 1):
            if layout.dtype in ("bf16", "e4m3"):
                key_at = page_at + (dim // 2) * 32 + lane * 2 + dim % 2
                value_at = page_at + 16 * d + (lane // 2) * 2 * d + dim * 2 + lane % 2
            else:
                key_at = page_at + dim * 16 + lane
                value_at = page_at + 16 * d + lane * d + dim
            assert block[key_at].float() == key[token, head, dim].float()
            assert block[value_at].float() == value[token, head, dim].float()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_summaries_follow_the_pages_of_the_last_head(layout: BlockLayout) -> None:
    key, value = random_block(layout)
    block, d = layout.pack_reference(key, value), layout.head_dim
    content, key = block[KV_HEADS * 2 * layout.block_tokens * d :].view(layout.row_dtype), key.to(layout.row_dtype)
    for head, page in itertools.product(range(KV_HEADS), range(layout.pages_per_block)):
        tokens = key[16 * page : 16 * page + 16, head]
        index = head * layout.pages_per_block + page
        if layout.summary == "minmax":
            at = index * 2 * d
            assert torch.equal(content[at : at + d], tokens.amax(0))
            assert torch.equal(content[at + d : at + 2 * d], tokens.amin(0))
        else:
            at = index * d
            assert torch.equal(
                content[at : at + d], ((tokens.amax(0).float() + tokens.amin(0).float()) / 2).to(key.dtype)
            )


@pytest.mark.parametrize("dtype", STORED_DTYPES)
def test_without_a_summary_a_block_is_its_pages(dtype: str) -> None:
    layout = BlockLayout(dtype=dtype, head_dim=32, block_tokens=48, summary="none")
    key, value = random_block(layout)
    block = layout.pack_reference(key, value)
    assert layout.head_block_bytes == 3 * layout.page_bytes
    assert block.numel() * block.element_size() == KV_HEADS * layout.head_block_bytes
    unpacked_key, unpacked_value, summaries = layout.unpack(block, KV_HEADS)
    assert torch.equal(unpacked_key, key.to(layout.row_dtype))
    assert torch.equal(unpacked_value, value.to(layout.row_dtype))
    assert summaries.shape == (KV_HEADS, 3, 0)


def test_sizes_in_bytes() -> None:
    layout = BlockLayout(dtype="bf16", head_dim=64, block_tokens=128, summary="minmax")
    assert layout.pages_per_block == 8
    assert layout.page_bytes == 16 * 64 * 2 * 2
    assert layout.summary_bytes == 2 * 64 * 2
    assert layout.head_block_bytes == 8 * (4096 + 256)


@pytest.mark.parametrize(
    ("head_dim", "code_bits", "dtype", "size"),
    [
        (64, 1, "bf16", 192),
        (64, 2, "bf16", 320),
        (96, 1, "bf16", 320),
        (96, 2, "bf16", 480),
        (96, 2, "e4m3", 480),
        (96, 2, "f32", 512),
        (128, 1, "bf16", 384),
        (128, 2, "bf16", 640),
        (128, 2, "e4m3", 640),
    ],
)
def test_sizes_of_key_codes_in_bytes(head_dim: int, code_bits: int, dtype: str, size: int) -> None:
    layout = BlockLayout(dtype=dtype, head_dim=head_dim, block_tokens=128, summary="key_codes", code_bits=code_bits)
    assert layout.summary_bytes == size


# Percent of the bytes of keys and values in bf16, by (head_dim, code_bits): cache lines cost small pages more.
OVER_EIGHT_PERCENT = {(16, 1): 9.38, (16, 2): 9.38, (32, 2): 9.38, (48, 2): 8.33}


@pytest.mark.parametrize("head_dim", range(16, MAX_HEAD_DIM + 1, 16))
@pytest.mark.parametrize("code_bits", CODE_BITS)
def test_key_codes_cost_less_than_eight_percent_at_all_but_some_head_sizes(head_dim: int, code_bits: int) -> None:
    layout = BlockLayout(dtype="bf16", head_dim=head_dim, block_tokens=128, summary="key_codes", code_bits=code_bits)
    percent = 100 * layout.summary_bytes / layout.page_bytes
    if (head_dim, code_bits) in OVER_EIGHT_PERCENT:
        assert round(percent, 2) == OVER_EIGHT_PERCENT[head_dim, code_bits]
    else:
        assert percent < 8


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize("summary", SUMMARY_VECTORS)
@pytest.mark.parametrize("code_bits", CODE_BITS)
def test_summaries_are_whole_elements_of_every_token(
    element_bytes: int, head_dim: int, summary: str, code_bits: int
) -> None:
    """vLLM's KV cache spec counts the bytes of a token, and views them as elements of the KV dtype."""
    assert summary_bytes(summary, head_dim, element_bytes, code_bits) % (PAGE_TOKENS * element_bytes) == 0


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.dtype != "e4m3"], ids=str)
def test_summaries_cost_less_than_eight_percent(layout: BlockLayout) -> None:
    assert layout.pages_per_block * layout.summary_bytes <= 0.08 * layout.pages_per_block * layout.page_bytes


@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [
        ({"dtype": "fp8"}, "dtype='fp8': must be one of bf16, f16, f32"),
        ({"summary": "mean"}, "summary='mean': must be one of minmax, cuboid_mean"),
        ({"head_dim": 0}, "head_dim=0: must be a multiple of 16, 16 to 512"),
        ({"head_dim": 72}, "head_dim=72: must be a multiple of 16, 16 to 512"),
        ({"head_dim": 528}, "head_dim=528: must be a multiple of 16, 16 to 512"),
        ({"block_tokens": 0}, "block_tokens=0: must be a multiple of 16, 16 or more"),
        ({"block_tokens": 24}, "block_tokens=24: must be a multiple of 16, 16 or more"),
    ],
)
def test_a_layout_that_the_kernels_lack_is_refused(wrong: dict[str, str | int], refusal: str) -> None:
    right = {"dtype": "bf16", "head_dim": 64, "block_tokens": 32, "summary": "minmax"}
    with pytest.raises(ConfigError, match=refusal):
        BlockLayout(**(right | wrong))  # type: ignore[arg-type]
