"""Decode rows of one layer and sequence gathered, so that what is computed of them reads the keys once for many."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from vllm_hybrid_sparse.hf import DecodeStep

_MOST_ROWS = 64


@contextmanager
def in_batches(record: Callable[[Sequence[DecodeStep]], None]) -> Iterator[Callable[[DecodeStep], None]]:
    """A watcher of decode rows that hands them on in batches of rows that follow one another; the rest at the end."""
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
    """Whether the row is the next of the same layer and sequence, its keys and values lying behind those before it."""
    return (
        step.layer == before.layer
        and step.keys.shape[1] == before.keys.shape[1] + 1
        and step.keys.data_ptr() == before.keys.data_ptr()
        and step.values.data_ptr() == before.values.data_ptr()
        and step.keys.stride() == before.keys.stride()
        and step.values.stride() == before.values.stride()
    )
