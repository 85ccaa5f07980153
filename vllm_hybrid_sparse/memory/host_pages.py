"""Pages of one layer's host store as plain rows: out of the CPU kernel's layout, whole pages at a time."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import KV_DTYPES
from vllm_hybrid_sparse.kernels.copy.reference import packed_together
from vllm_hybrid_sparse.kernels.listed_attention.state import HostStore
from vllm_hybrid_sparse.memory.layout import BlockLayout
from vllm_hybrid_sparse.memory.page_keys import places_of
from vllm_hybrid_sparse.values import PAGE_TOKENS

_VECTOR = 16
"""Elements that kernels read at a time: a page begins at a multiple of them."""


class HostPages:
    """One layer's KV memory, read by page. It is written by the native core and by vLLM, never here."""

    def __init__(self, kv_cache: Tensor, layout: BlockLayout, num_kv_heads: int) -> None:
        """KernelError for a dtype that devices do not take, and where kernels would misread a block or the next one.

        kv_cache   [blocks, …], any dtype; the first num_kv_heads * head_block_bytes bytes of a row are the block, and a
                   row is whole vectors of 16 elements of the KV dtype
        """
        if layout.torch_dtype not in KV_DTYPES:
            raise KernelError(f"dtype={layout.dtype}: must be bf16, f16 or f32, which devices take")
        row_bytes = kv_cache.stride(0) * kv_cache.element_size()
        if row_bytes < num_kv_heads * layout.head_block_bytes or row_bytes % layout.element_bytes:
            raise KernelError(
                f"kv_cache: rows of {row_bytes} bytes must hold whole elements, and a block of "
                f"{num_kv_heads * layout.head_block_bytes} bytes"
            )
        elements = kv_cache if kv_cache.dtype == layout.torch_dtype else kv_cache.view(layout.torch_dtype)
        if elements.stride(0) % _VECTOR:
            raise KernelError(f"block_stride={elements.stride(0)}: must be a multiple of {_VECTOR} elements")
        page_elements = layout.page_bytes // layout.element_bytes
        self._layout = layout
        block_elements = num_kv_heads * layout.head_block_bytes // layout.element_bytes
        self.elements = elements.as_strided(  # [elements] of the KV dtype: the first to the end of the last block
            ((len(kv_cache) - 1) * elements.stride(0) + block_elements,), (1,)
        )
        self._parts = elements.as_strided(  # [blocks, kv_heads, pages of a block, K or V, elements]
            (len(kv_cache), num_kv_heads, layout.pages_per_block, 2, page_elements // 2),
            (elements.stride(0), layout.pages_per_block * page_elements, page_elements, page_elements // 2, 1),
        )

    @property
    def geometry(self) -> HostStore:
        """The pages as the kernels find them that read them in place."""
        block, head, page = self._parts.stride()[:3]
        return HostStore(self.elements, block, head, page, self.pages_per_block)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the layer."""
        return self._parts.shape[1]

    @property
    def pages_per_block(self) -> int:
        """Pages of one KV head in a block."""
        return self._parts.shape[2]

    @property
    def summary_bytes(self) -> int:
        """Bytes of the summary of a page."""
        return self._layout.summary_bytes

    @property
    def num_pages(self) -> int:
        """Pages of one KV head in the whole store."""
        return self._parts.shape[0] * self._parts.shape[2]

    def offsets(self, kv_heads: Tensor, pages: Tensor) -> Tensor:
        """Where pages begin in `elements`, for the kernels that copy them.

        kv_heads, pages   int64, of shapes that broadcast
        returns           int64, multiples of 16
        """
        block, head, page = self._parts.stride()[:3]
        return pages // self.pages_per_block * block + kv_heads * head + pages % self.pages_per_block * page

    def read(self, numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """K and V of some pages of this layer.

        numbers   [pages]
        returns   key, value [pages, 16, head_dim] of the KV dtype; tokens that were never written hold anything
        """
        heads, pages = map(torch.from_numpy, places_of(numbers))
        parts = self._parts[pages // self.pages_per_block, heads, pages % self.pages_per_block]
        head_dim = self._layout.head_dim
        key, value = parts.unbind(1)
        if packed_together(self._layout.torch_dtype) == 2:
            key = key.view(-1, head_dim // 2, PAGE_TOKENS, 2).transpose(1, 2)
            value = value.view(-1, PAGE_TOKENS // 2, head_dim, 2).transpose(2, 3)
        else:
            key = key.view(-1, head_dim, PAGE_TOKENS).transpose(1, 2)
        shape = (-1, PAGE_TOKENS, head_dim)
        return key.reshape(shape), value.reshape(shape)
