"""Backs the host store with real memory, in huge pages, before the first request.

A fresh allocation is only a promise: its first use costs a page fault every 4 KiB in the middle of a prefill, memory
that the machine lacks is missed only then, and resident memory creeps up for as long as blocks stay unused. Huge
pages spare the address translation that scattered page reads would otherwise miss.
"""

import ctypes
import mmap
import os

import torch

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1


def prefault(tensor: torch.Tensor) -> list[str]:
    """Populate the storage of `tensor` and ask for huge pages; contents stay as they are.

    Returns the advice that the kernel declined ("populate", "collapse"): an older kernel serves as well, only slower.
    """
    storage = tensor.untyped_storage()
    page = mmap.PAGESIZE
    start = -(-storage.data_ptr() // page) * page
    length = (storage.data_ptr() + storage.nbytes() - start) // page * page
    if length <= 0:
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    declined = []
    for name, advice in (
        ("hugepage", _MADV_HUGEPAGE),
        ("populate", _MADV_POPULATE_WRITE),
        ("collapse", _MADV_COLLAPSE),
    ):
        if libc.madvise(start, length, advice) != 0:
            declined.append(f"{name}: {os.strerror(ctypes.get_errno())}")
    return declined
