"""Gathers decode rows of one layer and sequence, so that a computation reads the keys once for many rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from vllm_hybrid_sparse.hf import DecodeStep

_MOST_ROWS = 64


@contextmanager
def in_batches(record: Callable[[Sequence[DecodeStep]], None]) -> Iterator[Callable[[DecodeStep], None]]:
    """A watcher of decode rows that hands them on in batches of consecutive rows; the rest comes at the end."""
    waiting: list[DecodeStep] = []

    def watch(step: DecodeStep) -> None:
        if waiting and not (_follows(waiting[-1], step) and len(waiting) < _MOST_ROWS):
            record(list(waiting))
            waiting.clear()
        waiting.append(step)

    yield watch
    if waiting:
        record(waiting)


def _follows(before: DecodeStep, step: DecodeStep) -> bool:
    """Whether `step` is the next row of the same layer and sequence: its keys and values extend those of `before`."""
    return (
        step.layer == before.layer
        and step.keys.shape[1] == before.keys.shape[1] + 1
        and step.keys.data_ptr() == before.keys.data_ptr()
        and step.values.data_ptr() == before.values.data_ptr()
        and step.keys.stride() == before.keys.stride()
        and step.values.stride() == before.values.stride()
    )
