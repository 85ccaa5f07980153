"""Time in which the process is stopped does not count."""

import asyncio

import pytest

from benchmarks.soak.awake_clock import AwakeClock
from tests.load.virtual_time import run_virtually


def _stop_for(seconds: float) -> None:
    """Let the running loop's clock jump, as it does when the process is stopped."""
    asyncio.get_running_loop()._jumping.now_s += seconds  # type: ignore[attr-defined]


def test_it_counts_the_seconds_in_which_it_ran() -> None:
    async def run() -> float:
        clock = AwakeClock()
        ticking = asyncio.create_task(clock.run())
        await asyncio.sleep(60.2)
        ticking.cancel()
        return clock.awake_s

    assert run_virtually(run()) == pytest.approx(60.0)


def test_a_stop_counts_as_one_long_tick() -> None:
    async def run() -> float:
        clock = AwakeClock()
        ticking = asyncio.create_task(clock.run())
        await asyncio.sleep(10.2)
        _stop_for(3600.0)
        await asyncio.sleep(10.0)
        ticking.cancel()
        return clock.awake_s

    assert 20.0 <= run_virtually(run()) <= 22.5


def test_what_takes_too_long_awake_is_cancelled() -> None:
    async def run() -> bool:
        clock = AwakeClock()
        ticking = asyncio.create_task(clock.run())
        work = asyncio.ensure_future(asyncio.sleep(100.0))
        with pytest.raises(TimeoutError, match="not done within 5 s"):
            await clock.within(5.0, work)  # type: ignore[arg-type]
        ticking.cancel()
        return work.cancelled()

    assert run_virtually(run())


def test_what_is_done_in_time_gives_its_result_or_its_error() -> None:
    async def run() -> None:
        clock = AwakeClock()
        ticking = asyncio.create_task(clock.run())
        assert await clock.within(5.0, asyncio.sleep(1.0, "done")) == "done"

        async def fail() -> None:
            raise ValueError("bad")

        with pytest.raises(ValueError, match="bad"):
            await clock.within(5.0, fail())
        ticking.cancel()

    run_virtually(run())
