"""Backs the host store with real memory, in huge pages, before the first request.

A fresh allocation is only a promise. Its first use costs a page fault every 4 KiB in the middle of a prefill, a lack of
memory shows only then, and resident memory creeps up until every block has been used. Without huge pages, scattered
page reads would miss in the address translation.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import torch

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1

_PIECE_BYTES = 1 << 30
_MOST_THREADS = 8
"""The most threads that populate pieces at once. One thread took 2 to 7 s for 6 GiB in a virtual machine (ad hoc)."""


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
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    pieces = [(start + begin, min(_PIECE_BYTES, length - begin)) for begin in range(0, length, _PIECE_BYTES)]

    def advise(piece: tuple[int, int], advice: int) -> int:
        """0, or the error number if it was declined; other threads run meanwhile."""
        return 0 if libc.madvise(*piece, advice) == 0 else ctypes.get_errno()

    def spread_out() -> None:
        with contextlib.suppress(OSError):  # no core of these: the caller's
            os.sched_setaffinity(0, usable)  # of this thread

    usable = set(cores) or os.sched_getaffinity(0)
    declined = []
    with ThreadPoolExecutor(min(_MOST_THREADS, len(usable)), initializer=spread_out) as threads:
        for name, advice in (
            ("hugepage", _MADV_HUGEPAGE),
            ("populate", _MADV_POPULATE_WRITE),
            ("collapse", _MADV_COLLAPSE),
        ):
            errors = threads.map(advise, pieces, [advice] * len(pieces))
            if error := next((number for number in errors if number), 0):
                declined.append(f"{name}: {os.strerror(error)}")
    return declined
