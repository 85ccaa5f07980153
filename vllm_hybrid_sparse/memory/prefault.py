"""Backs the host store with real memory, in huge pages, before the first request.

A fresh allocation is only a promise. Its first use costs a page fault every 4 KiB in the middle of a prefill, a lack of
memory shows only then, and resident memory creeps up until every block has been used. Without huge pages, scattered
page reads would miss in the address translation.
"""

import mmap
import os
from collections.abc import Collection

import torch

from vllm_hybrid_sparse.memory import advice

_PIECE_BYTES = 1 << 30


def prefault(tensor: torch.Tensor, cores: Collection[int] = ()) -> list[str]:
    """Populate the storage of `tensor` and ask for huge pages; contents stay as they are.

    cores   for the threads that populate; empty: the caller's. vLLM binds the caller to one core on CPUs.

    Returns a line `advice: reason` for each of hugepage, populate and collapse that Linux declined. It also works
    without them, only more slowly.
    """
    storage = tensor.untyped_storage()
    page = mmap.PAGESIZE
    start = -(-storage.data_ptr() // page) * page
    length = (storage.data_ptr() + storage.nbytes() - start) // page * page
    if length <= 0:
        return []
    pieces = [(start + begin, min(_PIECE_BYTES, length - begin)) for begin in range(0, length, _PIECE_BYTES)]
    declined = []
    for name, number in (
        ("hugepage", advice.HUGEPAGE),
        ("populate", advice.POPULATE_WRITE),
        ("collapse", advice.COLLAPSE),
    ):
        if error := next((error for error in advice.advise(pieces, number, cores) if error), 0):
            declined.append(f"{name}: {os.strerror(error)}")
    return declined
