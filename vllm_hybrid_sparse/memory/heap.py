"""Gives unused heap memory back to the system.

A prompt's tensors are as long as its chunk, and allocations that live a little longer settle in the gaps between them.
So as lengths keep changing, glibc's heap gathers more and more free memory that is too scattered for the next tensor
but stays resident.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

IDLE_S = 10.0  # after a trim the next prompt's page faults take some 30 ms


def glibc_trim() -> Callable[[], object] | None:
    """glibc's malloc_trim for all free pages; None if the C library has no such function."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(ctypes.c_size_t(0))


class IdleTrimmer:
    """Trims on its own thread, once after each period of work, when work has rested for `idle_s` seconds.

    trim    gives free memory back; None: nothing is trimmed, and there is no thread
    """

    def __init__(self, trim: Callable[[], object] | None, idle_s: float = IDLE_S) -> None:
        self._trim = trim
        self._idle_s = idle_s
        self._working = False
        self._worked = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if trim is not None:
            self._thread = threading.Thread(target=self._watch, name="heap-trimmer", daemon=True)
            self._thread.start()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Mark a period of work. Nothing is trimmed during it, and the idle time starts at its end."""
        self._working = True
        try:
            yield
        finally:
            self._working = False
            self._worked.set()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._worked.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while self._worked.wait():
            while self._worked.is_set():
                self._worked.clear()
                if self._ended.wait(self._idle_s):
                    return
            assert self._trim is not None
            if not self._working:
                self._trim()
