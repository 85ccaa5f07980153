"""Tasks that device and host share hold what is left to do when the queue is made."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_hybrid_sparse.policy.planner import by_volume
from vllm_hybrid_sparse.runtime.both_sides import BothSides
from vllm_hybrid_sparse.runtime.readings import Reading
from vllm_hybrid_sparse.values import GroupKey


def reading(row: int, pages: int, candidates: int) -> Reading:
    """Some pages, chosen among candidates whose summaries were all scored."""
    return Reading(
        group=GroupKey(row, 0),
        pages=np.arange(pages),
        seq_len=16 * candidates + 100,
        microbatch_pages=8,
        candidates=candidates,
        scored=candidates,
    )


def test_a_task_s_place_is_what_it_still_reads() -> None:
    """Summaries were scored before: the row of a long context that reads little comes last."""
    tier: Any = SimpleNamespace(settings=SimpleNamespace(host_share="uniform"))
    host: Any = None
    step: Any = None
    readings = {of_row.group: of_row for of_row in (reading(0, 3, 6000), reading(1, 5, 100), reading(2, 0, 900))}
    tasks = BothSides(tier, host)._tasks(step, readings)
    assert [(task.group.row, task.pages) for task in by_volume(tasks)] == [(1, 5), (0, 3)]
