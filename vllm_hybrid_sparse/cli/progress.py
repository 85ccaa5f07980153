"""A line that shows that something is under way, and for how long."""

import sys
import threading
import time
from types import TracebackType
from typing import Self

_TERMINAL_INTERVAL_S = 0.2
_LOG_INTERVAL_S = 15.0
_SPINNER = "|/-\\"


class Progress:
    """Shows `label` with the seconds passed, from entry until `finish` or exit.

    On a terminal the line is rewritten in place; elsewhere a line is added now and then.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._begun = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    @property
    def running(self) -> bool:
        """Whether the line is still being shown."""
        return not self._over.is_set()

    def finish(self, result: str = "") -> None:
        """End the line with `result`; only the first call counts."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        start = "\r" if sys.stdout.isatty() else ""
        ending = f" {result}" if result else ""
        print(f"{start}{self._label} {time.monotonic() - self._begun:.1f} s{ending}", flush=True)

    def _show(self) -> None:
        terminal = sys.stdout.isatty()
        tick = 0
        while not self._over.wait(_TERMINAL_INTERVAL_S if terminal else _LOG_INTERVAL_S):
            passed_s = time.monotonic() - self._begun
            if terminal:
                print(f"\r{self._label} {passed_s:.0f} s {_SPINNER[tick % len(_SPINNER)]} ", end="", flush=True)
            else:
                print(f"{self._label} {passed_s:.0f} s …", flush=True)
            tick += 1

    def __enter__(self) -> Self:
        self._begun = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish("" if error is None else "(stopped)")
