"""Time that does not pass while this process is stopped."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

_TICK_S = 0.5
_LONGEST_TICK_S = 2.0  # the most that one tick may count on a busy machine


T = TypeVar("T")


class AwakeClock:
    """Counts the seconds in which this process ran: if it is stopped with its server, the server must not seem late.

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
        """Return the result of `work`; after `limit_s` awake seconds, cancel it and raise TimeoutError."""
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
