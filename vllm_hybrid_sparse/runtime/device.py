"""The interface between a step and any device: an ordered stream of attention over rounds of page slots.

Work happens in the order in which it was asked for, and a future stands for the event behind it. Nothing here blocks,
except as noted.
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
    """Partial attention of the decode rows of one layer. Only the device writes it while it has work."""

    query: Tensor  # [rows, q_heads, head_dim] of the KV dtype, in the device's memory
    out: Tensor  # [rows, q_heads, head_dim] f32, likewise, normalised; zeros where nothing was seen
    lse: Tensor  # [rows, q_heads] f32, likewise, natural log; -inf where nothing was seen
    shown_lse: Tensor  # [rows, q_heads] f32 in host memory: `lse` as of the last future that is done
    kept: Tensor  # [rows, kv_heads] f32 in host memory: P_acc at the last look at the group; 1 if there was none
    # If the policy keeps them: scaled scores of each reading's tokens, page after page, [rows, q_heads, tokens] f32.
    token_scores: Tensor | None = None  # in the device's memory
    shown_scores: Tensor | None = None  # in host memory: `token_scores`, once all futures of a wave are done

    @classmethod
    def empty(cls, query: Tensor, kv_heads: int, score_tokens: int = 0) -> "RowStates":
        """States of rows that have seen nothing, in the same memory as `query`, with room for `score_tokens` scores."""
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
    """Partial attention of the rows of a `RowStates`."""

    out: Tensor  # [rows, q_heads, head_dim] f32, normalised
    lse: Tensor  # [rows, q_heads] f32


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveFlags:
    """Which groups of a wave are done. Only the device writes them; host threads read them, at worst a little late.

    With a GPU both lie in pinned host memory (PSA, section 3.3), so that nobody has to wait for the device.
    """

    done: Tensor  # [looks, rows, kv_heads] uint8; 1 at any look: done. The first also marks groups not in the wave
    stop: Tensor  # [1] int32; 1 once every group is done

    @classmethod
    def of(
        cls, wave: ReadingWave, rows: int, kv_heads: int, *, looks: int = 1, device: torch.device | None = None
    ) -> "WaveFlags":
        """Flags for a wave, none of its groups done, in host memory that `device` may write to."""
        where = device or torch.device("cpu")
        done = host_empty((looks, rows, kv_heads), torch.uint8, where).zero_()
        done[0] = 1
        done[0, wave.rows, wave.kv_heads] = 0
        return cls(done=done, stop=host_empty((1,), torch.int32, where).zero_())

    def are_done(self, wave: ReadingWave) -> NDArray[np.bool_]:
        """[readings], whether the group needs no more pages."""
        if self.stop[0]:
            return np.ones(len(wave.readings), dtype=np.bool_)
        done: NDArray[np.bool_] = np.any(self.done.numpy()[:, wave.rows, wave.kv_heads], axis=0)
        return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """The result of a round."""

    parts: tuple[int, ...]  # parts of the load whose pages were attended
    wasted_pages: int  # pinned for groups that were done by their turn
    busy_s: float  # time that the device computed


class Wave(Protocol):
    """The execution of a `ReadingWave` of one layer."""

    @property
    def flags(self) -> WaveFlags:
        """Which groups the device calls done."""

    def attend(self, loaded: Future[Loaded], index: int) -> Future[Attended]:
        """Fold round `index` of the readings into the states once it is loaded, then check whether that is enough.

        Groups that are done are left alone. A reading with a threshold is done when P_acc exceeds it or no round is
        left.

        loaded    its parts are the readings, in their order
        """


class Device(Protocol):
    """A device with the pool's slots in its memory."""

    def begin(self, query: Tensor, kv_heads: int, score_tokens: int = 0) -> RowStates:
        """States in which nothing is seen yet.

        query          [rows, q_heads, head_dim]  of the KV dtype, in host memory
        score_tokens   tokens of each reading whose scores are kept; 0: none
        """

    def open_wave(self, states: RowStates, scale: float, wave: ReadingWave) -> Wave:
        """Open a wave, with nothing of it attended yet. `scale` is the factor of its scores."""

    def merge(self, states: RowStates, hosted: Mapping[GroupKey, HostState]) -> None:
        """Fold the host's results for groups into their rows (HGCA, section 3.3). No wave may have work then."""

    def join(self, states: RowStates, others: RowStates) -> None:
        """Fold other states of the same rows, over other tokens, into the first. No wave may have work then."""

    def brought(self, *parts: RowStates) -> list[PartialAttention]:
        """What the rows of each have attended so far, in host memory; valid until the device gets more work.

        Waits until it is there. No wave may have work then.
        """

    def copied(self, states: RowStates) -> PartialAttention:
        """A copy of what the rows have attended so far, in the device's memory. No wave may have work then."""

    def attribute(self, states: RowStates, retained: PartialAttention, log_unread: Tensor, share: float) -> None:
        """Attribute part of the unread weight to the candidates read (`kernels/merge/attribution.py`).

        No wave may have work then.

        retained     attention to the retained sets alone
        log_unread   [rows, q_heads] f32 in host memory, natural log; -inf where nothing is to be attributed
        """

    def attend_frames(
        self, query: Tensor, frames: tuple[Tensor, Tensor], rows: ResidentRows, output: Tensor, scale: float
    ) -> None:
        """Let resident rows attend to their whole contexts, including the new tokens, which are in frames by now.

        Does not wait: what the caller launches next follows.

        query    [tokens, q_heads, head_dim]   of the step, where the caller computes
        frames   K and V of the layer, as `Residency.frames` gives them
        output   [tokens, q_heads, head_dim]   likewise; rows of others are left alone
        """

    def give(self, states: RowStates, output: Tensor, rows: Sequence[int]) -> None:
        """Write the rows' attention to rows of `output` [any, q_heads, head_dim], which lies where the caller computes.

        The caller's later work finds it there.
        """

    def close(self) -> None:
        """Finish what was asked for and end the device's threads."""
