"""The way from a page of the host store to a slot and back, element by element, in plain torch.

A page of the host store is laid out for the CPU kernel (`csrc/layout.h`), a slot is K and V as plain rows:

    K part   bf16, e4m3: [head_dim / 2][16 tokens][2 dims]      f16, f32: [head_dim][16 tokens]
    V part   bf16, e4m3: [8 token pairs][head_dim][2 tokens]    f16, f32: [16 tokens][head_dim]

Slots hold bf16, f16 or f32, so pages of e4m3 have no way to them.
"""

import torch
from torch import Tensor

from vllm_hybrid_sparse.values import PAGE_TOKENS


def packed_together(dtype: torch.dtype) -> int:
    """Dims of a key, and tokens of a value, that lie side by side in the host store, for a bf16 dot product.

    dtype     of the pages: bf16 and e4m3, which is widened to it, have 2; f16 and f32 have 1
    """
    return 2 if dtype in (torch.bfloat16, torch.float8_e4m3fn) else 1


def key_element(token: int, dim: int, pack: int) -> int:
    """Where a page's K part holds a dimension of a token's key."""
    return (dim // pack * PAGE_TOKENS + token) * pack + dim % pack


def value_element(token: int, dim: int, head_dim: int, pack: int) -> int:
    """Where a page's V part holds a dimension of a token's value."""
    return (token // pack * head_dim + dim) * pack + token % pack


def unpack_page(page: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """K and V of one page.

    page      [2 * 16 * head_dim]   of the KV dtype, as the host store holds it
    returns   key, value            [16, head_dim]
    """
    pack = packed_together(page.dtype)
    key_part, value_part = page.view(2, -1).unbind()
    tokens, dims = range(PAGE_TOKENS), range(head_dim)
    key = [[key_part[key_element(token, dim, pack)] for dim in dims] for token in tokens]
    value = [[value_part[value_element(token, dim, head_dim, pack)] for dim in dims] for token in tokens]
    return torch.tensor(key, dtype=page.dtype), torch.tensor(value, dtype=page.dtype)


def pack_token(page: Tensor, token: int, key: Tensor, value: Tensor) -> None:
    """Write one token's K and V into a page of the host store.

    page         [2 * 16 * head_dim]   of the KV dtype, in and out
    token        place in the page, 0 to 15
    key, value   [head_dim]            of the KV dtype
    """
    pack = packed_together(page.dtype)
    key_part, value_part = page.view(2, -1).unbind()
    for dim in range(len(key)):
        key_part[key_element(token, dim, pack)] = key[dim]
        value_part[value_element(token, dim, len(value), pack)] = value[dim]
