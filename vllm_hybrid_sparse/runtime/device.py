"""What a step asks of a device, whichever it is: an ordered stream of attention over microbatches of page slots.

Nothing here blocks: what is asked for happens in order, and a future stands for the event after it.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import HostState
from vllm_hybrid_sparse.memory.transfers import Loaded
from vllm_hybrid_sparse.runtime.readings import Reading
from vllm_hybrid_sparse.values import GroupKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStates:
    """Partial attention of the decode rows of one layer. Its one writer is the device's stream while it has work."""

    out: Tensor  # [rows, q_heads, head_dim] f32, normalised; zeros where nothing was seen
    lse: Tensor  # [rows, q_heads] f32, natural log; -inf where nothing was seen
    lightest_lse: Tensor  # [rows, q_heads] f32, of the candidate page that weighs least; inf before any
    kept: Tensor  # [rows, kv_heads] f32, P_acc when the group was last looked at; 1 where it never was

    @classmethod
    def empty(cls, rows: int, q_heads: int, kv_heads: int, head_dim: int) -> "RowStates":
        """Nothing seen."""
        return cls(
            out=torch.zeros(rows, q_heads, head_dim),
            lse=torch.full((rows, q_heads), -torch.inf),
            lightest_lse=torch.full((rows, q_heads), torch.inf),
            kept=torch.ones(rows, kv_heads),
        )

    def heads(self, group: GroupKey) -> slice:
        """The query heads of a group."""
        size = self.lse.shape[1] // self.kept.shape[1]
        return slice(group.kv_head * size, (group.kv_head + 1) * size)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveFlags:
    """Which groups of a wave are done. Its one writer is the device; host threads read it, at worst a little late.

    On a GPU both lie in pinned host memory (PSA, section 3.3), so that nobody has to wait for the device.
    """

    done: Tensor  # [rows, kv_heads] uint8; 1 also for the groups that are not of the wave
    stop: Tensor  # [1] int32; 1 once every group is done

    @classmethod
    def of(cls, groups: Sequence[GroupKey], rows: int, kv_heads: int) -> "WaveFlags":
        """The groups of a wave, none of them done."""
        done = torch.ones(rows, kv_heads, dtype=torch.uint8)
        for row, kv_head in groups:
            done[row, kv_head] = 0
        return cls(done=done, stop=torch.zeros(1, dtype=torch.int32))

    def is_done(self, group: GroupKey) -> bool:
        """Whether the group needs no more pages."""
        return bool(self.stop[0]) or bool(self.done[group.row, group.kv_head])


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """What a microbatch was good for."""

    parts: tuple[int, ...]  # of the load: those whose pages were attended
    wasted_pages: int  # pinned for groups that were done when their turn came
    busy_s: float  # time that the device computed


class Device(Protocol):
    """A device with the pool's slots in its memory."""

    def begin(self, rows: int, q_heads: int, kv_heads: int, head_dim: int) -> RowStates:
        """States in which nothing is seen yet."""

    def attend(
        self,
        query: Tensor,
        scale: float,
        states: RowStates,
        flags: WaveFlags,
        loaded: Future[Loaded],
        readings: Sequence[Reading],
        index: int,
    ) -> Future[Attended]:
        """Fold microbatch `index` of some readings into the states once it is loaded, then look whether it is enough.

        Groups that are done are left as they are. A reading with a threshold is done when P_acc exceeds it, and when it
        has no further microbatch.

        query     [rows, q_heads, head_dim]  of the KV dtype
        scale     factor of the scores
        loaded    its parts are those of the readings, in their order
        """

    def merge(self, states: RowStates, group: GroupKey, state: HostState) -> None:
        """Fold what the host computed for a group into its rows (HGCA, section 3.3); the stream has no work then."""

    def close(self) -> None:
        """Finish what was asked for and end the device's threads."""
