"""What stood in for something better in this process, counted by kind. Whoever falls back logs it once, too."""

from collections import Counter
from threading import Lock

FALLBACKS = (
    "merge_kernel",  # states are merged by another kernel than the one that suits them, whose package is missing
    "warm_up",  # kernels for long contexts failed to warm up and are compiled when they are first needed
    "device_graphs",  # launches cannot be captured in CUDA graphs, and go one by one from then on
    "device_ranking",  # the device lacks the memory to choose pages by itself, and the host does
    "device_resident_share",  # not one block fits this share of the pool, and no request is resident
)
"""The kinds; one is named after the setting that has no effect then, if there is such a setting."""

_lock = Lock()
_counts: Counter[str] = Counter()  # since they were taken last


def count_fallback(kind: str) -> None:
    """Count one more. Threads may share this."""
    assert kind in FALLBACKS, kind
    with _lock:
        _counts[kind] += 1


def take_fallbacks() -> dict[str, int]:
    """How many there were of each kind since the last call; kinds without any are left out."""
    with _lock:
        taken = dict(_counts)
        _counts.clear()
    return taken
