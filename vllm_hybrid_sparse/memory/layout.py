"""How the KV memory of one layer is laid out for the CPU kernels (`csrc/layout.h` is the same in C++).

A block holds the pages of its KV heads, head by head, then the summaries of these pages, head by head, because scoring
reads the summaries of all heads in one piece.

    block    [kv_heads][pages], [kv_heads][summaries]; split_codes: [kv_heads][pages], [kv_heads][coarse parts],
             [kv_heads][fine parts]
    page     K part, V part; 16 tokens each
    K part   bf16, e4m3: [head_dim / 2][16 tokens][2 dims]      f16, f32: [head_dim][16 tokens]
    V part   bf16, e4m3: [8 token pairs][head_dim][2 tokens]    f16, f32: [16 tokens][head_dim]
    summary  minmax: [max: head_dim][min: head_dim]       cuboid_mean: [centre: head_dim]
             key_codes, for any dtype: lines of [16 tokens][4] bytes, a byte holding 8 / code_bits dims (4 apart) from
             its lowest bits on; [head_dim / 2] bytes with the mean; [16 tokens] factor bytes; bf16 unit of the
             factors; bf16 unit of the mean; zeros; a byte that is 1 if a common key was taken out (kernels/key_codes)
             split_codes: key codes of two bits in two parts. Coarse part: laid out like codes of one bit, with the
             higher bits (the signs) and a unit of the factors that suits signs alone. The factors' own unit lies where
             the zeros would begin. Fine part: the lower bits, in lines like those of the signs (csrc/split_codes.h)
             none: nothing

One bf16 dot-product instruction then gives 16 token scores (K) or 16 output dims (V) with no sum across lanes. All
elements, including bounds and centres, have the KV dtype. With e4m3 (eight bits: OCP's FP8 for inference) bounds and
centres are bf16, the type that e4m3 is widened to. Only the summary of a full page is valid.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.kernels.arguments import row_dtype
from vllm_hybrid_sparse.kernels.copy.reference import packed_together
from vllm_hybrid_sparse.kernels.key_codes.reference import encode_keys, pack_codes, pack_split_codes
from vllm_hybrid_sparse.kernels.summarize.reference import summarize_pages
from vllm_hybrid_sparse.values import (
    CODE_BITS,
    PAGE_TOKENS,
    SPLIT_HEAD_DIM,
    SUMMARY_VECTORS,
    fine_bytes,
    head_dim_fits,
    head_dim_rule,
    summary_bytes,
)

TORCH_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""Dtypes of rows, and of all pages but e4m3, by name."""
STORED_DTYPES = {**TORCH_DTYPES, "e4m3": torch.float8_e4m3fn}
"""Dtypes of pages, by name."""


def _bytes(part: Tensor) -> Tensor:
    """[..., n] becomes [..., n * itemsize] uint8."""
    return part.contiguous().view(torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Sizes of one KV head's part of a block; packs and unpacks blocks. Raises ConfigError."""

    dtype: str  # of K, V and summaries: bf16 | f16 | f32; e4m3, whose summaries are bf16
    head_dim: int  # a multiple of 16, 16 to 512
    block_tokens: int  # tokens of vLLM's block; a multiple of 16
    summary: str  # minmax | cuboid_mean | key_codes | split_codes | none
    code_bits: int = 2  # bits per dimension of key_codes

    def __post_init__(self) -> None:
        if self.dtype not in STORED_DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: must be one of {', '.join(STORED_DTYPES)}")
        if self.summary not in SUMMARY_VECTORS:
            raise ConfigError(f"summary={self.summary!r}: must be one of {', '.join(SUMMARY_VECTORS)}")
        if self.code_bits not in CODE_BITS:
            raise ConfigError(f"code_bits={self.code_bits}: must be 1 or 2")
        if self.summary == "split_codes" and self.code_bits != CODE_BITS[-1]:
            raise ConfigError(f"code_bits={self.code_bits}: split codes have {CODE_BITS[-1]}")
        if not head_dim_fits(self.head_dim):
            raise ConfigError(f"head_dim={self.head_dim}: {head_dim_rule()}")
        if self.summary == "split_codes" and self.head_dim % SPLIT_HEAD_DIM:
            raise ConfigError(f"head_dim={self.head_dim}: split codes need a multiple of {SPLIT_HEAD_DIM}")
        if self.block_tokens % PAGE_TOKENS or self.block_tokens < PAGE_TOKENS:
            raise ConfigError(
                f"block_tokens={self.block_tokens}: must be a multiple of {PAGE_TOKENS}, {PAGE_TOKENS} or more"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The KV dtype as torch names it."""
        return STORED_DTYPES[self.dtype]

    @property
    def row_dtype(self) -> torch.dtype:
        """Dtype of bounds and centres, and of keys and values before they are stored."""
        return row_dtype(self.torch_dtype)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of K or V."""
        return self.torch_dtype.itemsize

    @property
    def pages_per_block(self) -> int:
        """Pages of one KV head in a block."""
        return self.block_tokens // PAGE_TOKENS

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, K and V; V begins in the middle."""
        return 2 * PAGE_TOKENS * self.head_dim * self.element_bytes

    @property
    def summary_bytes(self) -> int:
        """Bytes of the summary of one page; both parts of split codes."""
        return summary_bytes(self.summary, self.head_dim, self.row_dtype.itemsize, self.code_bits)

    @property
    def head_block_bytes(self) -> int:
        """Bytes of a block per KV head: pages and their summaries."""
        return self.pages_per_block * (self.page_bytes + self.summary_bytes)

    def stored(self, rows: Tensor) -> Tensor:
        """Keys or values as pages hold them, converted back to `row_dtype`; e4m3 clamps what is too large."""
        largest = torch.finfo(self.torch_dtype).max
        narrow = rows.clamp(-largest, largest) if self.torch_dtype != self.row_dtype else rows
        return narrow.to(self.torch_dtype).to(self.row_dtype)

    def pack_reference(self, key: Tensor, value: Tensor) -> Tensor:
        """The block that holds K and V and the summaries of its pages.

        key, value   [block_tokens, kv_heads, head_dim], of the KV dtype
        returns      [kv_heads * head_block_bytes / element_bytes], of the KV dtype
        """
        paged_key, paged_value = (
            part.transpose(0, 1).reshape(-1, self.pages_per_block, PAGE_TOKENS, self.head_dim) for part in (key, value)
        )
        if packed_together(self.torch_dtype) == 2:
            key_part = paged_key.unflatten(-1, (-1, 2)).transpose(2, 3)
            value_part = paged_value.unflatten(2, (-1, 2)).transpose(3, 4)
        else:
            key_part = paged_key.transpose(2, 3)
            value_part = paged_value
        parts = [torch.cat([_bytes(part.flatten(2)) for part in (key_part, value_part)], dim=2)]
        keys = key.to(self.row_dtype).unbind(1)
        if self.summary == "split_codes":
            codes = [pack_split_codes(encode_keys(head, CODE_BITS[-1])) for head in keys]
            parts += [torch.stack(part) for part in zip(*codes, strict=True)]
        elif self.summary == "key_codes":
            parts += [pack_codes(encode_keys(head, self.code_bits), self.row_dtype.itemsize) for head in keys]
        elif self.summary != "none":
            parts += [_bytes(summarize_pages(head, self.summary)) for head in keys]
        return torch.cat([part.flatten() for part in parts]).view(self.torch_dtype)

    def unpack(self, block: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """K, V and the summaries that a block holds.

        block     [any], num_kv_heads * head_block_bytes contiguous bytes of any dtype
        returns   key, value [block_tokens, kv_heads, head_dim] of `row_dtype`; summaries [kv_heads, pages, vectors,
                  head_dim] likewise, but [kv_heads, pages, summary_bytes] uint8 for key codes and none, with the fine
                  part of split codes after the coarse
        """
        content = block.view(torch.uint8)
        pages_bytes = num_kv_heads * self.pages_per_block * self.page_bytes
        pages = content[:pages_bytes].view(self.torch_dtype).to(self.row_dtype)
        key_part, value_part = pages.view(num_kv_heads, self.pages_per_block, 2, -1).unbind(2)
        if packed_together(self.torch_dtype) == 2:
            key = key_part.unflatten(-1, (-1, PAGE_TOKENS, 2)).transpose(2, 3)
            value = value_part.unflatten(-1, (-1, self.head_dim, 2)).transpose(3, 4)
        else:
            key = key_part.unflatten(-1, (-1, PAGE_TOKENS)).transpose(2, 3)
            value = value_part
        heads_shape = (num_kv_heads, self.block_tokens, self.head_dim)
        rest = content[pages_bytes : num_kv_heads * self.head_block_bytes]
        if self.summary == "split_codes":
            fine = num_kv_heads * self.pages_per_block * fine_bytes(self.summary, self.head_dim)
            parts = [part.view(num_kv_heads, self.pages_per_block, -1) for part in (rest[:-fine], rest[-fine:])]
            summaries = torch.cat(parts, dim=2)
        elif self.summary in ("key_codes", "none"):
            summaries = rest.view(num_kv_heads, self.pages_per_block, self.summary_bytes)
        else:
            summaries = rest.view(self.row_dtype).view(num_kv_heads, self.pages_per_block, -1, self.head_dim)
        return key.reshape(heads_shape).transpose(0, 1), value.reshape(heads_shape).transpose(0, 1), summaries
