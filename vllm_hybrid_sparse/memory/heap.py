"""Gives unused heap memory back to the system.

A prompt's tensors are as long as its chunk, and allocations that live a little longer settle in the gaps between them.
So as lengths keep changing, glibc's heap gathers more and more free memory that is too scattered for the next tensor
but stays resident.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

IDLE_S = 10.0  # after a trim the next prompt's page faults take some 30 ms
LOOK_S = 20.0  # a trim takes some 15 ms, beside those faults
GROWTH_BYTES = 256 * 2**20


def glibc_trim() -> Callable[[], object] | None:
    """glibc's malloc_trim for all free pages; None if the C library has no such function."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(ctypes.c_size_t(0))


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class HeapTrimmer:
    """Trims on its own thread, once after each period of work, when work has rested for `idle_s` seconds.

    Work that does not rest ends with a trim, too, once resident memory exceeds the least that was seen since the last
    trim by more than `growth_bytes`. It looks every `look_s` seconds at most.

    trim       gives free memory back; None: nothing is trimmed, and there is no thread
    resident   bytes of memory that the process has now
    """

    def __init__(
        self,
        trim: Callable[[], object] | None,
        idle_s: float = IDLE_S,
        *,
        resident: Callable[[], int] = resident_bytes,
        look_s: float = LOOK_S,
        growth_bytes: int = GROWTH_BYTES,
    ) -> None:
        self._trim = trim
        self._idle_s = idle_s
        self._resident, self._look_s, self._growth_bytes = resident, look_s, growth_bytes
        self._looked_s = -look_s  # on the clock of time.monotonic
        self._least: int | None = None  # resident bytes, since the last trim
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
            self._look()
        finally:
            self._working = False
            self._worked.set()

    def _look(self) -> None:
        """Trim on the caller's thread if resident memory has grown."""
        now_s = time.monotonic()
        if self._trim is None or now_s - self._looked_s < self._look_s:
            return
        self._looked_s = now_s
        resident = self._resident()
        if self._least is not None and resident > self._least + self._growth_bytes:
            self._trim()
            self._least = self._resident()
        else:
            self._least = resident if self._least is None else min(self._least, resident)

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
