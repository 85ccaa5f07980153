"""What a reading begins with, and how much of its order each group reads."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError


class RankedPages(NamedTuple):
    """The candidates of each group as they are to be read, and where to find one."""

    order: Tensor  # [rows, kv_heads, listed] int64, candidates from 0; `score.gpu.rank_pages`, or `best_pages`
    scores: Tensor  # [rows, q_heads, most] f32, log of the weight that each candidate is estimated to have; -inf: none
    candidates: Tensor  # [rows] int32, 0 to most
    budgets: Tensor  # [rows] int32, how many may be read, 0 to candidates, and to those listed


class PageTables(NamedTuple):
    """Where a request's page lies: in the host store, and by the directory in a slot."""

    blocks: Tensor  # [rows, any] int32, rows may be strided; of each row's request, trusted
    slots: Tensor  # [entries] int32, the directory's
    first_page: int  # the request's page that candidate 0 is
    first_entry: int  # of the layer
    store_pages: int  # of one KV head in the host store


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """How many pages of its order each group reads, and what is left then. On the device."""

    counts: Tensor  # [rows, kv_heads] int32
    log_unread: Tensor  # [rows, q_heads] f32, what candidates that are not read are estimated to weigh; -inf: nothing
    kept: Tensor  # [rows, kv_heads] f32, P_acc of the head that has the least; what is estimated until it is looked at


def check_rule(threshold: float, microbatch_pages: int) -> None:
    """Raise KernelError for a threshold outside (0, 1] or microbatches of no page."""
    if not 0 < threshold <= 1:
        raise KernelError(f"threshold={threshold}: must be in (0, 1]")
    if microbatch_pages < 1:
        raise KernelError(f"microbatch_pages={microbatch_pages}: must be 1 or more")
