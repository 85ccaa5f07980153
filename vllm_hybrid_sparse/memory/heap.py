"""Gives heap memory that nobody uses back to the system.

A prompt's tensors are as long as its chunk, and what lives a little longer settles in the gaps between them. So with
ever new lengths glibc's heap has ever more free memory, too scattered for the next tensor, which stays resident.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

IDLE_S = 10.0  # the next prompt after a trim meets page faults for what it uses anew, some 30 ms


def glibc_trim() -> Callable[[], object] | None:
    """glibc's malloc_trim, of all free pages; None where the C library has none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(ctypes.c_size_t(0))


class IdleTrimmer:
    """Trims on a thread of its own, once after each time of work, when that has rested for `idle_s` seconds.

    trim    what gives free memory back; None: nothing does, and there is no thread
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
        """Nothing is trimmed within it, however long it takes; the rest begins at its end."""
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
