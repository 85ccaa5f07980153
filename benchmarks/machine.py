"""What every result file says about the machine and the code that were measured."""

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def commit() -> str:
    """Return the short commit id, `+changes` if the working tree differs from it; `unknown` outside git."""
    try:
        name = _git("rev-parse", "--short", "HEAD")
        return f"{name}+changes" if _git("status", "--porcelain", "--untracked-files=no") else name
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    run = subprocess.run(["git", "-C", str(REPOSITORY), *args], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def _from_proc(path: str, key: str) -> str:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


def without_places(argument: str) -> str:
    """A command-line argument with every absolute path in it cut to its last name: results hold no paths."""
    return re.sub(r"(^|(?<=[=,]))/[^,]*/(?=[^/,]+)", "", argument)


@cache
def provenance() -> dict[str, object]:
    """Return commit, machine, command, time and load at the first call, ready for JSON; callers must not change it."""
    return {
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *map(without_places, sys.orig_argv[1:])]),
        "cpu": _from_proc("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_flags": sorted(
            flag for flag in _from_proc("/proc/cpuinfo", "flags").split() if flag.startswith(("avx", "amx"))
        ),
        "memory": _from_proc("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "load_average_before": os.getloadavg()[0],
    }
