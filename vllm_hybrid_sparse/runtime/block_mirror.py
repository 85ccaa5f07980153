"""Block tables in host memory, mirrored from the scheduler's output: on a GPU vLLM keeps its own on the device."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_hybrid_sparse.errors import KernelError

BatchIds = Callable[[Any], Sequence[str]]
"""Names the requests of a step in the order of its rows. Its argument is the step's own row order, if it has one."""


class BlockMirror:
    """The blocks of running requests. Only the thread that runs the steps writes it."""

    def __init__(self) -> None:
        self._blocks: dict[str, array[int]] = {}  # 32-bit numbers, which a step copies as a whole
        self._batch_ids: BatchIds | None = None

    def start(self, request_id: str, blocks: Sequence[int]) -> None:
        """A request begins, or begins again, with these blocks and no others."""
        self._blocks[request_id] = array("i", blocks)

    def extend(self, request_id: str, blocks: Sequence[int]) -> None:
        """A request gets further blocks. KernelError if it is unknown."""
        if request_id not in self._blocks:
            raise KernelError(f"request_id={request_id!r}: gets blocks and never began")
        self._blocks[request_id].extend(blocks)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget the blocks of requests that finished, were aborted or preempted; unknown requests have none."""
        for request_id in request_ids:
            self._blocks.pop(request_id, None)

    @contextmanager
    def step(self, batch_ids: BatchIds) -> Iterator[None]:
        """Mark a step of real requests. Outside of one, vLLM runs made-up steps to warm up and to profile."""
        self._batch_ids = batch_ids
        try:
            yield
        finally:
            self._batch_ids = None

    def names(self, order: Any = None) -> Sequence[str] | None:
        """The step's requests, in the order of its rows; None in a made-up step."""
        return None if self._batch_ids is None else self._batch_ids(order)

    def tables(self, order: Any = None) -> "list[array[int]] | None":
        """The blocks of the step's requests, in the order of its rows; None in a made-up step."""
        names = self.names(order)
        return None if names is None else [self._blocks[request_id] for request_id in names]

    def __len__(self) -> int:
        return len(self._blocks)
