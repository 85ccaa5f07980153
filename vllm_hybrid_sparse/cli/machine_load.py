"""How busy the machine is before something is measured on it."""

import time
from collections.abc import Callable
from pathlib import Path

BUSY = 0.15
"""Share of processor time from which on times say little."""


def busy_share(seconds: float, read: Callable[[], str] | None = None) -> float:
    """The share of all processors' time that programs take during the next seconds; 0 if the system does not say.

    read   gives what /proc/stat has, which is Linux's; None: reads it
    """
    read = read or Path("/proc/stat").read_text
    try:
        before = _ticks(read())
        time.sleep(seconds)
        after = _ticks(read())
    except (OSError, ValueError, IndexError):
        return 0.0
    idle, every = (now - then for now, then in zip(after, before, strict=True))
    return 1 - idle / every if every > 0 else 0.0


def _ticks(stat: str) -> tuple[int, int]:
    """Idle time (waiting for disks included) and all time since the start, of all processors together."""
    # "cpu  user nice system idle iowait irq softirq steal …"; guests' time, behind these, is in user and nice already
    ticks = [int(number) for number in stat.splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
