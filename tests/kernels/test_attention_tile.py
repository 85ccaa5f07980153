"""How many tokens a program of the device's attention takes at a time: what was chosen, if that fits every GPU."""

import pytest
import torch

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import LISTED_TILES, attention_tile, block_group, device_fits
from vllm_hybrid_sparse.values import PAGE_TOKENS

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("tiles", [2, LISTED_TILES])
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_half_precision_has_the_tile_that_was_chosen(dtype: torch.dtype, head_dim: int, heads: int, tiles: int) -> None:
    most = 64 if tiles == 2 else 32
    assert attention_tile(most, heads, head_dim, dtype, tiles=tiles) == most


@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads", "folding", "listed"),
    [
        (F32, 128, 16, 64, 32),
        (F32, 128, 32, 64, 32),
        (F32, 128, 64, 32, 32),
        (F32, 144, 16, 32, 16),
        (F32, 256, 16, 32, 16),
        (F32, 256, 32, 16, 16),
        (BF16, 256, 64, 32, 32),
        (BF16, 256, 128, 16, 16),
        (BF16, 64, 128, 64, 32),
    ],
)
def test_what_does_not_fit_is_halved(dtype: torch.dtype, head_dim: int, heads: int, folding: int, listed: int) -> None:
    assert attention_tile(64, heads, head_dim, dtype) == folding
    assert attention_tile(32, heads, head_dim, dtype, tiles=LISTED_TILES) == listed


def test_heads_that_do_not_fit_beside_a_page_are_refused() -> None:
    with pytest.raises(KernelError, match=r"^heads=64: .* needs 104448 bytes .*, must be at most 101376$"):
        attention_tile(64, 64, 256, F32)


@pytest.mark.parametrize("group", [1, 32, 33, 64, 71, 128])
@pytest.mark.parametrize("head_dim", [16, 128, 144, 256])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_group_fits_if_every_kernel_has_a_tile(dtype: torch.dtype, head_dim: int, group: int) -> None:
    assert device_fits(group, head_dim, dtype) == (dtype == BF16 or head_dim <= 128 or group <= 32)
    if device_fits(group, head_dim, dtype):
        assert attention_tile(64, block_group(group), head_dim, dtype) >= PAGE_TOKENS
        assert attention_tile(32, block_group(group), head_dim, dtype, tiles=LISTED_TILES) >= PAGE_TOKENS
