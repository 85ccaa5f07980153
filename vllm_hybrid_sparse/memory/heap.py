"""Gives heap memory that nobody uses back to the system.

A prompt's tensors are as long as its chunk. What lives longer settles in the gaps between them, so that with ever new
lengths glibc's heap has ever more free memory that lies too scattered for the next tensor, and stays resident.
"""

import ctypes
from collections.abc import Callable

INTERVAL_S = 60.0  # a trim takes tens of milliseconds


def glibc_trim() -> Callable[[], object] | None:
    """glibc's malloc_trim for all free pages; None where the C library has none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(ctypes.c_size_t(0))


class HeapTrimmer:
    """Trims at intervals, whenever it is asked.

    trim    what gives free memory back; None: nothing does
    """

    def __init__(self, trim: Callable[[], object] | None) -> None:
        self._trim = trim
        self._due_s = 0.0

    def tidy(self, now_s: float) -> None:
        """Trim, unless that was done within the last `INTERVAL_S`. `now_s`: a monotonic time."""
        if self._trim is not None and now_s >= self._due_s:
            self._due_s = now_s + INTERVAL_S
            self._trim()
