"""Workers agree on numbers, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

WORKER = """
import sys
from torch import distributed
from vllm_hybrid_sparse.glue.agreement import least_of

rank, number = int(sys.argv[1]), int(sys.argv[3])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
both = distributed.new_group([0, 1])
alone = [distributed.new_group([member]) for member in (0, 1)][rank]
print(least_of(number, []), least_of(number, [alone]), least_of(number, [both, alone]), least_of(number, [alone, both]))
"""


def test_every_worker_learns_the_least(tmp_path: Path) -> None:
    """Whether those that have different numbers are in the first group or the last."""
    numbers = (2**40 + 5, 2**40 + 3)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(tmp_path / "store"), str(number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, number in enumerate(numbers)
    ]
    try:
        said = [worker.communicate(timeout=240)[0].split() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert said == [[str(own), str(own), str(min(numbers)), str(min(numbers))] for own in numbers]
