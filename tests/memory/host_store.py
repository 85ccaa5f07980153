"""A small host store whose every token is known, for tests of the pool and its loader."""

import torch
from torch import Tensor

from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.layout import BlockLayout
from vllm_hybrid_sparse.memory.page_keys import PageKey
from vllm_hybrid_sparse.values import PAGE_TOKENS

HEAD_DIM = 16


class Store:
    """Layers of one host store in float32. The K and V of a token are its one number in every dimension."""

    def __init__(self, *, layers: int = 1, kv_heads: int = 2, blocks: int = 8, pages_per_block: int = 1) -> None:
        layout = BlockLayout(dtype="f32", head_dim=HEAD_DIM, block_tokens=PAGE_TOKENS * pages_per_block, summary="none")
        block_bytes = kv_heads * layout.head_block_bytes
        self.layers, self.kv_heads = layers, kv_heads
        self.pages = blocks * pages_per_block
        self.caches = [torch.full((blocks, block_bytes), 0xFF, dtype=torch.uint8) for _ in range(layers)]
        self.sources = [HostPages(cache, layout, kv_heads) for cache in self.caches]

    def _parts(self, key: PageKey) -> tuple[Tensor, Tensor]:
        block, page = divmod(key.page, self.sources[key.layer].pages_per_block)
        part = self.sources[key.layer]._parts[block, key.kv_head, page]
        return part[0].view(HEAD_DIM, PAGE_TOKENS), part[1].view(PAGE_TOKENS, HEAD_DIM)

    def write(self, key: PageKey, offset: int, number: float) -> None:
        """Store one token."""
        keys, values = self._parts(key)
        keys[:, offset] = number
        values[offset] = number

    def fill(self, key: PageKey, number: float) -> None:
        """Store a whole page of the same token."""
        for offset in range(PAGE_TOKENS):
            self.write(key, offset, number)

    def fill_all(self) -> dict[PageKey, float]:
        """Store a different number in every page; return the numbers."""
        keys = [
            PageKey(layer, head, page)
            for layer in range(self.layers)
            for head in range(self.kv_heads)
            for page in range(self.pages)
        ]
        numbers = {key: float(number) for number, key in enumerate(keys)}
        for key, number in numbers.items():
            self.fill(key, number)
        return numbers
