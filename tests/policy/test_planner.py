"""Who computes which group: static splits and the queue."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hybrid_sparse.policy.planner import PLANNERS, by_volume, plan_length, plan_queue, plan_uniform
from vllm_hybrid_sparse.policy.task_queue import TaskQueue
from vllm_hybrid_sparse.values import GroupKey, GroupTask, Plan


def task(row: int, kv_head: int, pages: int, missing: int | None = None) -> GroupTask:
    missing = pages if missing is None else missing
    return GroupTask(group=GroupKey(row, kv_head), pages=pages, missing=missing)


TASKS = st.lists(
    st.builds(task, st.integers(0, 5), st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)),
    max_size=12,
    unique_by=lambda made: made.group,
)


def test_larger_tasks_come_first_and_ties_go_by_row_and_head() -> None:
    made = by_volume([task(1, 1, 2), task(0, 0, 1), task(1, 0, 2), task(0, 1, 9)])
    assert [one.group for one in made] == [(0, 1), (1, 0), (1, 1), (0, 0)]


@pytest.mark.parametrize("share", PLANNERS)
@given(tasks=TASKS)
def test_every_task_is_planned_once(share: str, tasks: list[GroupTask]) -> None:
    plan = PLANNERS[share](tasks)
    planned = [*plan.device, *plan.host, *plan.either]
    assert sorted(one.group for one in planned) == sorted(one.group for one in tasks)
    for side in (plan.device, plan.host, plan.either):
        assert list(side) == list(by_volume(side))


def test_uniform_gives_every_second_group_to_the_host() -> None:
    plan = plan_uniform([task(row, kv_head, 5) for row in range(2) for kv_head in range(2)])
    assert [one.group for one in plan.host] == [(0, 1), (1, 1)]


def test_length_keeps_rows_whole_and_sides_even() -> None:
    rows = {0: 10, 1: 40, 2: 20, 3: 10}
    plan = plan_length([task(row, kv_head, pages) for row, pages in rows.items() for kv_head in range(2)])
    assert {one.group.row for one in plan.host} == {1}
    assert {one.group.row for one in plan.device} == {0, 2, 3}


def test_what_the_device_holds_is_the_devices() -> None:
    plan = plan_queue([task(0, 0, 5, missing=0), task(0, 1, 5, missing=1)])
    assert [one.group for one in plan.device] == [(0, 0)]
    assert [one.group for one in plan.either] == [(0, 1)]


def test_the_device_takes_half_of_what_the_host_may_take_too() -> None:
    queue = TaskQueue(Plan(either=tuple(task(0, head, 9 - head) for head in range(5))))
    assert [one.group.kv_head for one in queue.take_for_device(8)] == [0, 1, 2]
    first = queue.take_for_host()
    assert first is not None
    assert first.group.kv_head == 3
    assert [one.group.kv_head for one in queue.take_for_device(8)] == [4]
    assert queue.take_for_host() is None
    assert queue.take_for_device(8) == []


def test_the_device_takes_no_more_than_fits() -> None:
    queue = TaskQueue(Plan(device=tuple(task(0, head, 1) for head in range(5))))
    assert [len(queue.take_for_device(2)) for _ in range(4)] == [2, 2, 1, 0]


def test_a_side_leaves_what_is_its_alone_for_last() -> None:
    queue = TaskQueue(Plan(host=(task(0, 0, 9),), either=(task(0, 1, 2),), device=(task(0, 2, 1),)))
    first, second = queue.take_for_host(), queue.take_for_host()
    assert first is not None
    assert second is not None
    assert [first.group.kv_head, second.group.kv_head] == [1, 0]
    assert [one.group.kv_head for one in queue.take_for_device(1)] == [2]


def test_two_threads_take_every_task_once() -> None:
    tasks = tuple(task(row, head, 3) for row in range(200) for head in range(8))
    queue, start = TaskQueue(Plan(either=tasks)), threading.Barrier(2)
    by_host: list[GroupTask] = []
    by_device: list[GroupTask] = []

    def host() -> None:
        start.wait()
        while one := queue.take_for_host():
            by_host.append(one)

    def device() -> None:
        start.wait()
        while some := queue.take_for_device(3):
            by_device.extend(some)

    threads = [threading.Thread(target=side) for side in (host, device)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.group for one in by_host + by_device) == [one.group for one in tasks]
    assert len(queue) == 0
