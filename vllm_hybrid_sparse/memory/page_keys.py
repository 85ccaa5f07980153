"""Pages of the host store by name, and by number, since many are looked up, pinned and copied at once."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

NO_PAGE = -1
"""Pads parts that have fewer pages than others."""

_PAGE_BITS = 40
_HEAD_BITS = 11

LAYER_SHIFT = _PAGE_BITS + _HEAD_BITS
"""A page's number shifted right by this many bits is its layer."""


class PageKey(NamedTuple):
    """A page of the host store. Only writes change its content, whichever requests share it."""

    layer: int  # below 2^12
    kv_head: int  # below 2^11
    page: int  # block id * pages of a block + page in the block: the slot of a token in vLLM's slot mapping // 16

    @property
    def number(self) -> int:
        """The page's number, as in `page_numbers`."""
        return int(page_numbers(*self))

    @classmethod
    def of(cls, number: int) -> Self:
        """The page that a number stands for."""
        return cls(number >> LAYER_SHIFT, *map(int, places_of(np.int64(number))))


def page_numbers(layer: int, kv_heads: ArrayLike, pages: ArrayLike) -> NDArray[np.int64]:
    """Numbers of pages of one layer, in the broadcast shape of the int64 arguments."""
    return (
        (np.int64(layer) << LAYER_SHIFT) | (np.asarray(kv_heads, np.int64) << _PAGE_BITS) | np.asarray(pages, np.int64)
    )


def block_page_numbers(layer: int, kv_heads: int, blocks: ArrayLike, pages_per_block: int) -> NDArray[np.int64]:
    """Numbers of all pages of blocks in one layer, [blocks, kv_heads, pages of a block]."""
    pages = np.asarray(blocks, np.int64)[:, None, None] * pages_per_block + np.arange(pages_per_block)
    return page_numbers(layer, np.arange(kv_heads)[:, None], pages)


def places_of(numbers: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The KV heads and pages that numbers stand for, each in the shape of `numbers`."""
    of = np.asarray(numbers, np.int64)
    return (of >> _PAGE_BITS) & ((1 << _HEAD_BITS) - 1), of & ((1 << _PAGE_BITS) - 1)
