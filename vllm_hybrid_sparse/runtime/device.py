"""What a step asks of a device, whichever it is: an ordered stream of attention over rounds of page slots.

Nothing here blocks: what is asked for happens in order, and a future stands for the event after it.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import HostState
from vllm_hybrid_sparse.memory.queues import host_empty
from vllm_hybrid_sparse.memory.transfers import Loaded
from vllm_hybrid_sparse.runtime.readings import ReadingWave
from vllm_hybrid_sparse.runtime.residency import ResidentRows
from vllm_hybrid_sparse.values import GroupKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStates:
    """Partial attention of the decode rows of one layer. Its one writer is the device while it has work."""

    query: Tensor  # [rows, q_heads, head_dim] of the KV dtype, where the device attends
    out: Tensor  # [rows, q_heads, head_dim] f32 there, normalised; zeros where nothing was seen
    lse: Tensor  # [rows, q_heads] f32 there, natural log; -inf where nothing was seen
    shown_lse: Tensor  # [rows, q_heads] f32 in host memory: `lse` when the last future that is done was
    kept: Tensor  # [rows, kv_heads] f32 in host memory, P_acc when the group was last looked at; 1 where it never was
    # Where the policy keeps them, [rows, q_heads, tokens] f32: scaled scores of each reading's tokens, page after page.
    token_scores: Tensor | None = None  # where the device attends
    shown_scores: Tensor | None = None  # in host memory: `token_scores`, once all futures of a wave are done

    @classmethod
    def empty(cls, query: Tensor, kv_heads: int, score_tokens: int = 0) -> "RowStates":
        """Nothing seen by rows whose queries, and states, lie where `query` does; room for scores of so many tokens."""
        rows, q_heads, _ = query.shape
        on_host = query.device.type == "cpu"
        lse = torch.full((rows, q_heads), -torch.inf, device=query.device)
        shown = lse
        if not on_host:
            shown = host_empty((rows, q_heads), torch.float32, query.device).fill_(-torch.inf)
        scores = shown_scores = None
        if score_tokens:
            scores = shown_scores = torch.full((rows, q_heads, score_tokens), -torch.inf, device=query.device)
            if not on_host:
                shown_scores = host_empty((rows, q_heads, score_tokens), torch.float32, query.device)
        return cls(
            query=query,
            out=torch.zeros(query.shape, device=query.device),
            lse=lse,
            shown_lse=shown,
            kept=torch.ones(rows, kv_heads),
            token_scores=scores,
            shown_scores=shown_scores,
        )

    def heads(self, group: GroupKey) -> slice:
        """The query heads of a group."""
        size = self.lse.shape[1] // self.kept.shape[1]
        return slice(group.kv_head * size, (group.kv_head + 1) * size)


class PartialAttention(NamedTuple):
    """Of the rows of a `RowStates`."""

    out: Tensor  # [rows, q_heads, head_dim] f32, normalised
    lse: Tensor  # [rows, q_heads] f32


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveFlags:
    """Which groups of a wave are done. Its one writer is the device; host threads read it, at worst a little late.

    Beside a GPU both lie in pinned host memory (PSA, section 3.3), so that nobody has to wait for the device.
    """

    done: Tensor  # [looks, rows, kv_heads] uint8; 1 at any look: done. At the first also the groups not of the wave
    stop: Tensor  # [1] int32; 1 once every group is done

    @classmethod
    def of(
        cls, wave: ReadingWave, rows: int, kv_heads: int, *, looks: int = 1, device: torch.device | None = None
    ) -> "WaveFlags":
        """The groups of a wave, none of them done; in host memory that `device` may write to."""
        where = device or torch.device("cpu")
        done = host_empty((looks, rows, kv_heads), torch.uint8, where).zero_()
        done[0] = 1
        done[0, wave.rows, wave.kv_heads] = 0
        return cls(done=done, stop=host_empty((1,), torch.int32, where).zero_())

    def are_done(self, wave: ReadingWave) -> NDArray[np.bool_]:
        """[readings], those whose groups need no more pages."""
        if self.stop[0]:
            return np.ones(len(wave.readings), dtype=np.bool_)
        done: NDArray[np.bool_] = np.any(self.done.numpy()[:, wave.rows, wave.kv_heads], axis=0)
        return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """What a round was good for."""

    parts: tuple[int, ...]  # of the load: those whose pages were attended
    wasted_pages: int  # pinned for groups that were done when their turn came
    busy_s: float  # time that the device computed


class Wave(Protocol):
    """A `ReadingWave` of one layer that is carried out."""

    @property
    def flags(self) -> WaveFlags:
        """What the device says of the groups."""

    def attend(self, loaded: Future[Loaded], index: int) -> Future[Attended]:
        """Fold round `index` of the readings into the states once it is loaded, then look whether it is enough.

        Groups that are done are left as they are. A reading with a threshold is done when P_acc exceeds it, and when it
        has no further round.

        loaded    its parts are the readings, in their order
        """


class Device(Protocol):
    """A device with the pool's slots in its memory."""

    def begin(self, query: Tensor, kv_heads: int, score_tokens: int = 0) -> RowStates:
        """States in which nothing is seen yet.

        query          [rows, q_heads, head_dim]  of the KV dtype, in host memory
        score_tokens   of each reading, whose scores are kept; 0 keeps none
        """

    def open_wave(self, states: RowStates, scale: float, wave: ReadingWave) -> Wave:
        """A wave of which nothing is attended yet; `scale` is the factor of its scores."""

    def merge(self, states: RowStates, hosted: Mapping[GroupKey, HostState]) -> None:
        """Fold what the host computed for groups into their rows (HGCA, section 3.3); no wave has work then."""

    def join(self, states: RowStates, others: RowStates) -> None:
        """Fold other states of the same rows, over other tokens, into the first; no wave has work then."""

    def brought(self, *parts: RowStates) -> list[PartialAttention]:
        """What the rows of each have attended so far, in host memory; good until more is asked for.

        Waits until it is there. No wave has work then.
        """

    def copied(self, states: RowStates) -> PartialAttention:
        """What the rows have attended so far, where the device has it; no wave has work then."""

    def attribute(self, states: RowStates, retained: PartialAttention, log_unread: Tensor, share: float) -> None:
        """Give part of what is unread to the candidates read (`kernels/merge/attribution.py`); no wave has work then.

        retained     of the retained sets alone
        log_unread   [rows, q_heads] f32 in host memory, natural log; -inf where nothing is to be given
        """

    def attend_frames(
        self, query: Tensor, frames: tuple[Tensor, Tensor], rows: ResidentRows, output: Tensor, scale: float
    ) -> None:
        """Attend with resident rows to all of their contexts, the new tokens included, which are in frames by now.

        Nothing is waited for: what the caller launches next follows.

        query    [tokens, q_heads, head_dim]   of the step, where the caller computes
        frames   K and V of the layer, as `Residency.frames` gives them
        output   [tokens, q_heads, head_dim]   likewise; rows of others are left alone
        """

    def give(self, states: RowStates, output: Tensor, rows: Sequence[int]) -> None:
        """Write the rows' attention to rows of `output` [any, q_heads, head_dim], which lies where the caller computes.

        The caller's own work that follows finds it there.
        """

    def close(self) -> None:
        """Finish what was asked for and end the device's threads."""
