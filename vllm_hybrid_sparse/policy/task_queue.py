"""The queue of a step's group tasks: device and host each take more when they have finished what they took."""

import threading
from collections import deque

from vllm_hybrid_sparse.values import GroupTask, Plan


class TaskQueue:
    """A plan being carried out (Fluxion, section 6.2). Every task is taken once, by one side. Threads may share it.

    It differs from Fluxion's queue in these points. There the GPU predicts, and a task is top-k selection and attention
    of a group. Here the host predicts, and ranks the pages of all groups in one call before the queue is made, with all
    of its threads; a task is attention alone. So tasks are ordered by the pages that they still read. There each side
    takes one task; here the device takes several at a time (`take_for_device`), and those whose pages it holds are its
    own.

    A side takes the tasks that only it may take last, because the other side would take the shared ones meanwhile.
    """

    def __init__(self, plan: Plan) -> None:
        self._lock = threading.Lock()
        self._either = deque(plan.either)
        self._device = deque(plan.device)
        self._host = deque(plan.host)

    def take_for_host(self) -> GroupTask | None:
        """The largest task left for the host; None if there is none, and then none will come."""
        with self._lock:
            for tasks in (self._either, self._host):
                if tasks:
                    return tasks.popleft()
            return None

    def take_for_device(self, at_most: int) -> list[GroupTask]:
        """The largest tasks left for the device, to compute side by side; empty if there are none, and none will come.

        It takes at most half of the remaining tasks that the host may take too. The host goes on with the others
        meanwhile, and the last tasks, which are the smallest, balance when the two sides finish.

        at_most   tasks whose working sets fit the device together; >= 1
        """
        with self._lock:
            if self._either:
                return [self._either.popleft() for _ in range(min(at_most, (len(self._either) + 1) // 2))]
            return [self._device.popleft() for _ in range(min(at_most, len(self._device)))]

    def __len__(self) -> int:
        with self._lock:
            return len(self._either) + len(self._device) + len(self._host)
