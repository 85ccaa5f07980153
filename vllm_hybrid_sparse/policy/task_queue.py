"""The queue from which device and host take the group tasks of a step, each when it has finished what it took."""

import threading
from collections import deque

from vllm_hybrid_sparse.values import GroupTask, Plan


class TaskQueue:
    """A plan being carried out (Fluxion, section 6.2). Every task is taken once, by one side; threads may share it.

    A side takes what the plan gives to it alone last: what either may take would be gone meanwhile.
    """

    def __init__(self, plan: Plan) -> None:
        self._lock = threading.Lock()
        self._either = deque(plan.either)
        self._device = deque(plan.device)
        self._host = deque(plan.host)

    def take_for_host(self) -> GroupTask | None:
        """The largest task left for the host; None: there is none, and none will come."""
        with self._lock:
            for tasks in (self._either, self._host):
                if tasks:
                    return tasks.popleft()
            return None

    def take_for_device(self, at_most: int) -> list[GroupTask]:
        """The largest tasks left for the device, computed side by side; empty: there is none, and none will come.

        Of what the host may take too, no more than half of what is left: while the device is at it the host goes on,
        and the last tasks, the smallest, even out who finishes first.

        at_most   tasks whose working sets fit the device together; >= 1
        """
        with self._lock:
            if self._either:
                return [self._either.popleft() for _ in range(min(at_most, (len(self._either) + 1) // 2))]
            return [self._device.popleft() for _ in range(min(at_most, len(self._device)))]

    def __len__(self) -> int:
        with self._lock:
            return len(self._either) + len(self._device) + len(self._host)
