"""Looking at a server that has no load."""

import asyncio

import pytest

from benchmarks.soak import __main__ as soak
from benchmarks.soak.awake_clock import AwakeClock
from benchmarks.soak.talk import Talk
from tests.load.virtual_time import run_virtually


class HangingTalk(Talk):
    """A server that takes the question for its metrics and never answers."""

    def __init__(self) -> None:
        pass

    async def exposition(self) -> str:
        await asyncio.sleep(1e9)
        return ""


def test_metrics_that_never_come_end_the_soak() -> None:
    async def look() -> float:
        clock = AwakeClock()
        ticking = asyncio.create_task(clock.run())
        with pytest.raises(RuntimeError, match="GET /metrics: not done within 120 s"):
            await soak.at_rest(HangingTalk(), clock, 0.0)
        ticking.cancel()
        return clock.awake_s

    assert run_virtually(look()) < 125.0
