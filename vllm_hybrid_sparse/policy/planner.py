"""Which group tasks of a step the device computes and which the host, by their volumes and what the device holds.

A task is what a group reads beyond the retained set, which is always the device's.
"""

from collections.abc import Callable, Sequence

from vllm_hybrid_sparse.values import GroupTask, Plan


def by_volume(tasks: Sequence[GroupTask]) -> tuple[GroupTask, ...]:
    """The tasks that read most first (Fluxion, section 6.2), ties by row and KV head.

    Fluxion orders by V(blk), eq. 3: the summaries that ranking reads, and the budgets of the group's heads. Ours are
    ranked by now, so no summary is left to read, and the pages of the heads' union are known. What a task still reads
    is those pages.
    """
    return tuple(sorted(tasks, key=lambda task: (-task.pages, task.group)))


def plan_none(tasks: Sequence[GroupTask]) -> Plan:
    """Everything on the device: Fluxion's GPU-only placement (section 2.2), not its "No Parallel" (`plan_all`)."""
    return Plan(device=by_volume(tasks))


def plan_all(tasks: Sequence[GroupTask]) -> Plan:
    """Everything on the host: Fluxion's hybrid placement (section 2.2), its "No Parallel" (section 8.3)."""
    return Plan(host=by_volume(tasks))


def plan_uniform(tasks: Sequence[GroupTask]) -> Plan:
    """Every second group on the host, in order of row and KV head, whatever the groups read."""
    ordered = sorted(tasks, key=lambda task: task.group)
    return Plan(device=by_volume(ordered[0::2]), host=by_volume(ordered[1::2]))


def plan_length(tasks: Sequence[GroupTask]) -> Plan:
    """Whole rows, longest first, each for the side that has less to read so far; the host gets the first.

    The length of a row is what its groups may read together.
    """
    rows: dict[int, list[GroupTask]] = {}
    for task in tasks:
        rows.setdefault(task.group.row, []).append(task)
    sides: tuple[list[GroupTask], list[GroupTask]] = ([], [])
    loads = [0, 0]
    lengths = {row: sum(task.pages for task in row_tasks) for row, row_tasks in rows.items()}
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        side = 0 if loads[0] <= loads[1] else 1
        sides[side].extend(rows[row])
        loads[side] += lengths[row]
    return Plan(host=by_volume(sides[0]), device=by_volume(sides[1]))


def plan_queue(tasks: Sequence[GroupTask]) -> Plan:
    """One queue for both. Groups whose pages the device holds are the device's, since nothing has to move for them."""
    return Plan(
        device=by_volume([task for task in tasks if not task.missing]),
        either=by_volume([task for task in tasks if task.missing]),
    )


PLANNERS: dict[str, Callable[[Sequence[GroupTask]], Plan]] = {
    "none": plan_none,
    "uniform": plan_uniform,
    "length": plan_length,
    "queue": plan_queue,
    "all": plan_all,
}
