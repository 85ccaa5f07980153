"""The plan that leaves everything to the host."""

from vllm_hybrid_sparse.policy.planner import PLANNERS, plan_all
from vllm_hybrid_sparse.policy.task_queue import TaskQueue
from vllm_hybrid_sparse.settings import HOST_SHARES
from vllm_hybrid_sparse.values import GroupKey, GroupTask


def test_the_host_gets_all_even_what_the_device_holds() -> None:
    tasks = [GroupTask(group=GroupKey(0, head), pages=head, missing=0) for head in range(3)]
    queue = TaskQueue(plan_all(tasks))
    assert queue.take_for_device(8) == []
    taken = []
    while task := queue.take_for_host():
        taken.append(task.group.kv_head)
    assert taken == [2, 1, 0]


def test_every_share_has_a_planner() -> None:
    assert tuple(PLANNERS) == HOST_SHARES
