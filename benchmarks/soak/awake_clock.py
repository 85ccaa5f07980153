"""Time that does not pass while this process is stopped."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

_TICK_S = 0.5
_LONGEST_TICK_S = 2.0  # what a tick may count for on a busy machine


T = TypeVar("T")


class AwakeClock:
    """Seconds in which this process ran. One that is stopped together with its server must not find it late.

    Written by `run` alone.
    """

    def __init__(self) -> None:
        self.awake_s = 0.0

    async def run(self) -> None:
        """Count until cancelled."""
        now = asyncio.get_running_loop().time
        last_s = now()
        while True:
            await asyncio.sleep(_TICK_S)
            at_s = now()
            self.awake_s += min(at_s - last_s, _LONGEST_TICK_S)
            last_s = at_s

    async def within(self, limit_s: float, work: Coroutine[None, None, T]) -> T:
        """Return the result of `work`; TimeoutError, and `work` cancelled, where `limit_s` awake seconds do not do."""
        task, end_s = asyncio.ensure_future(work), self.awake_s + limit_s
        try:
            while not task.done():
                if self.awake_s > end_s:
                    raise TimeoutError(f"not done within {limit_s:g} s")
                await asyncio.wait({task}, timeout=_TICK_S)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
