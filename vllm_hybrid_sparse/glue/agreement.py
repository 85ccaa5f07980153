"""Numbers that all workers of an engine have to agree on, since vLLM reads the output of one worker alone."""

from collections.abc import Iterable

import torch
from torch import distributed


def least_of(number: int, groups: Iterable[distributed.ProcessGroup]) -> int:
    """The least of the numbers that the workers of some groups give.

    Each of them must call it with the same groups in the same order; it waits for all.

    number   at most 2^63 - 1
    groups   for CPU tensors, and such that the least of the first's leasts is the least of all, and so on: for example
             the workers of one stage, then those of one rank in all stages
    """
    least = torch.tensor(number, dtype=torch.int64)
    for group in groups:
        distributed.all_reduce(least, op=distributed.ReduceOp.MIN, group=group)
    return int(least)
