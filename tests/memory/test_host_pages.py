"""Pages come out of the CPU kernel's layout as rows of tokens."""

import itertools

import pytest
import torch

from tests.memory.pages import numbered
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.layout import TORCH_DTYPES, BlockLayout
from vllm_hybrid_sparse.memory.page_keys import PageKey

KV_HEADS = 3


@pytest.mark.parametrize("summary", ["none", "key_codes"])
@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_every_page_is_what_was_packed(dtype: str, block_tokens: int, summary: str, as_bytes: bool) -> None:
    layout = BlockLayout(dtype=dtype, head_dim=48, block_tokens=block_tokens, summary=summary)
    key, value = torch.randn(2, 4, block_tokens, KV_HEADS, 48).to(layout.torch_dtype)
    blocks = torch.stack([layout.pack_reference(*block) for block in zip(key, value, strict=True)])
    rows = torch.nn.functional.pad(blocks.view(torch.uint8), (0, 64), value=0xFF)  # each of more bytes than a block
    cache = rows[:, :-64] if as_bytes else rows.view(layout.torch_dtype)
    pages = HostPages(cache, layout, KV_HEADS)
    of_block = block_tokens // 16
    assert (pages.num_kv_heads, pages.pages_per_block, pages.num_pages) == (KV_HEADS, of_block, 4 * of_block)
    keys = [PageKey(0, head, page) for head, page in itertools.product((2, 0, 1), reversed(range(4 * of_block)))]
    read_key, read_value = pages.read(numbered(keys))
    for index, (_, head, page) in enumerate(keys):
        block, tokens = page // of_block, slice(page % of_block * 16, page % of_block * 16 + 16)
        assert torch.equal(read_key[index], key[block, tokens, head])
        assert torch.equal(read_value[index], value[block, tokens, head])
    assert pages.read(numbered([]))[0].shape == (0, 16, 48)


def test_eight_bits_which_devices_do_not_take_are_refused() -> None:
    layout = BlockLayout(dtype="e4m3", head_dim=16, block_tokens=16, summary="none")
    cache = torch.empty(2, KV_HEADS * layout.head_block_bytes, dtype=torch.uint8)
    with pytest.raises(KernelError, match=r"^dtype=e4m3: must be bf16, f16 or f32"):
        HostPages(cache, layout, KV_HEADS)


def test_elements_end_with_the_last_block_which_may_be_the_end_of_the_memory() -> None:
    """As where the blocks of two layers lie side by side in each row."""
    layout = BlockLayout(dtype="f32", head_dim=16, block_tokens=16, summary="none")
    block_bytes = KV_HEADS * layout.head_block_bytes
    rows = torch.zeros(2, 2 * block_bytes, dtype=torch.uint8)
    for cache in (rows[:, :block_bytes], rows[:, block_bytes:]):
        elements = HostPages(cache, layout, KV_HEADS).elements
        assert elements.data_ptr() == cache.data_ptr()
        assert elements.nbytes == 3 * block_bytes


def test_a_row_that_holds_no_block_is_refused() -> None:
    layout = BlockLayout(dtype="f32", head_dim=16, block_tokens=16, summary="none")
    with pytest.raises(KernelError, match="rows of 4096 bytes must hold whole elements, and a block of 6144 bytes"):
        HostPages(torch.empty(2, 4096, dtype=torch.uint8), layout, KV_HEADS)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_blocks_that_kernels_would_misread_are_refused(*, as_bytes: bool) -> None:
    layout = BlockLayout(dtype="bf16", head_dim=16, block_tokens=16, summary="none")
    cache = torch.empty(2, 3 * 512 + 8, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match="block_stride=1544: must be a multiple of 16 elements"):
        HostPages(cache.view(torch.uint8) if as_bytes else cache, layout, KV_HEADS)
