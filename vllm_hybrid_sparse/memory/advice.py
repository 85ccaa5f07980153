"""Advice to Linux about ranges of this process's memory (madvise), given by several threads at once."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

HUGEPAGE = 14
POPULATE_WRITE = 23  # Linux 5.14
COLLAPSE = 25  # Linux 6.1

_MOST_THREADS = 8
"""The most threads that populate pieces at once. One thread took 2 to 7 s for 6 GiB in a virtual machine (ad hoc)."""

Range = tuple[int, int]
"""Address and bytes."""


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library, with calls that keep their error number."""
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return library


def advise(ranges: Sequence[Range], advice: int, cores: Collection[int] = ()) -> list[int]:
    """Advise on each range; return 0 for it, or the error number if it was declined.

    cores   for the threads; empty, or none of them usable: the caller's. vLLM binds the caller to one core on CPUs.
    """
    call = libc().madvise

    def advise_one(piece: Range) -> int:
        """Other threads run meanwhile."""
        return 0 if call(*piece, advice) == 0 else ctypes.get_errno()

    def spread_out() -> None:
        with contextlib.suppress(OSError):  # no core of these: the caller's
            os.sched_setaffinity(0, usable)  # of this thread

    usable = set(cores) or os.sched_getaffinity(0)
    with ThreadPoolExecutor(min(_MOST_THREADS, len(usable)), initializer=spread_out) as threads:
        return list(threads.map(advise_one, ranges))
