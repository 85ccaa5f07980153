"""How long OpenMP's threads keep their cores busy while they wait for work."""

import os

SPIN_COUNT_VARIABLE = "GOMP_SPINCOUNT"
SPIN_COUNT = "8000"
"""Rounds that a thread of GNU's OpenMP looks for work before it sleeps: some 80 µs on a Zen 4, more where `pause` waits
longer.

Longer than what lies between two parallel regions of a forward pass, and shorter than what lies between two passes.
"""


def shorten_openmp_waits() -> None:
    """Have workers that this process starts wait so, where the user says nothing of it.

    GNU's OpenMP looks for work for milliseconds by itself when its threads are bound to cores, which vLLM's are. So
    where they are bound to all of them, a thread that has nothing to do between two steps holds the core that the
    engine needs to begin the next one. vLLM shortens the wait of Intel's OpenMP (`KMP_BLOCKTIME`), and not this one.
    Read when the library is loaded: to be called before workers are started.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_COUNT_VARIABLE, SPIN_COUNT)
