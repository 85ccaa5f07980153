"""What one group of a decode row reads, in rounds, and when that is enough (PSA, section 3.2, Algorithm 1).

PSA checks the threshold after every microbatch. If key codes tell beforehand how much will be enough, the first round
is that much. Without a threshold there is nothing to check, and everything is one round, as far as the device has room.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.memory.page_keys import NO_PAGE
from vllm_hybrid_sparse.values import MICROBATCHES_IN_FLIGHT, PAGE_TOKENS, GroupKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Pages of one group, of the retained set or candidates, in the order of reading."""

    group: GroupKey
    pages: NDArray[np.int64]  # of the request, 0 its first
    seq_len: int  # tokens of the request
    microbatch_pages: int
    threshold: float | None = None  # stop once more than this share of the weight is read; None: read all
    expected: int = 0  # pages that are estimated to be enough, in whole microbatches; 0: unknown
    candidates: int = 0  # page policies: of the group, read or not
    scored: int = 0  # of them, those whose summaries were scored
    # Log weight that key codes estimate for the unread pages after each microbatch, [microbatches, group].
    log_unread: NDArray[np.float32] | None = None
    lightest_rest: bool = False  # P_acc counts every unread page as heavy as the lightest one read (line 15)

    @property
    def estimated_rest(self) -> NDArray[np.float32] | None:
        """`log_unread` if P_acc uses it for the unread pages; otherwise None."""
        return None if self.lightest_rest else self.log_unread

    @property
    def first_round(self) -> int:
        """Pages that are read before the first look."""
        if self.threshold is None:
            return len(self.pages)
        return min(len(self.pages), max(self.expected, self.microbatch_pages))

    def estimate_after(self, pages_read: int) -> int:
        """The row of `log_unread` that says what is unread after this many pages, at least 1."""
        return -(-pages_read // self.microbatch_pages) - 1

    def log_rest(self, pages_read: int, lightest_lse: Tensor) -> Tensor:
        """The log weight that the unread pages are assumed to have after this many pages: whole microbatches, or all.

        lightest_lse   [group]   log-sum-exp of the lightest candidate page read; inf before any
        returns        [group]   natural log; -inf if every candidate is read
        """
        left = self.candidates - pages_read
        if left == 0:
            return torch.full_like(lightest_lse, -torch.inf)
        if self.estimated_rest is not None:
            return torch.from_numpy(self.estimated_rest[self.estimate_after(pages_read)]).to(lightest_lse.dtype)
        return lightest_lse + math.log(left)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingWave:
    """Readings that are carried out side by side, in rounds. Each is of another group; all have one threshold."""

    readings: tuple[Reading, ...]
    rows: NDArray[np.int64]  # [readings], of their groups
    kv_heads: NDArray[np.int64]  # [readings], likewise
    pages: NDArray[np.int64]  # [readings, most pages], padded with NO_PAGE
    page_tokens: NDArray[np.int64]  # likewise: 16, maybe fewer for a request's last page; 0 for NO_PAGE
    ends: NDArray[np.int64]  # [rounds + 1, readings], pages read before each round, and in the end

    @classmethod
    def of(cls, readings: Sequence[Reading], room_pages: int | None = None) -> Self:
        """Put one or more readings side by side.

        room_pages   slots that they may pin together, though never less than two microbatches of each; None: any number
        """
        assert len({reading.threshold for reading in readings}) == 1, "the readings of a wave have one threshold"
        most = max(len(reading.pages) for reading in readings)
        pages = np.full((len(readings), most), NO_PAGE, dtype=np.int64)
        for of_reading, reading in zip(pages, readings, strict=True):
            of_reading[: len(reading.pages)] = reading.pages
        groups = np.array([reading.group for reading in readings], dtype=np.int64)
        seq_lens = np.array([[reading.seq_len] for reading in readings])
        return cls(
            readings=tuple(readings),
            rows=groups[:, 0],
            kv_heads=groups[:, 1],
            pages=pages,
            page_tokens=np.where(pages < 0, 0, np.minimum(seq_lens - PAGE_TOKENS * pages, PAGE_TOKENS)),
            ends=round_ends(readings, room_pages),
        )

    @property
    def threshold(self) -> float | None:
        """Where the readings stop; None: they are read whole."""
        return self.readings[0].threshold

    @property
    def rounds(self) -> int:
        """The most rounds that any of the readings has."""
        return len(self.ends) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[readings], how many pages each has."""
        lengths: NDArray[np.int64] = self.ends[-1]
        return lengths

    def round_lengths(self, index: int) -> NDArray[np.int64]:
        """[readings], how many pages each reads in a round."""
        lengths: NDArray[np.int64] = self.ends[index + 1] - self.ends[index]
        return lengths

    def of_round(self, values: NDArray[np.int64], index: int, behind: int) -> NDArray[np.int64]:
        """The values that belong to the pages of a round.

        values    [readings, most pages]
        behind    padding after a reading's last page of the round
        returns   [readings, most pages of the round]
        """
        lengths = self.round_lengths(index)
        places = np.arange(lengths.max())
        columns = np.minimum(self.ends[index][:, None] + places, values.shape[1] - 1)
        return np.where(places < lengths[:, None], np.take_along_axis(values, columns, axis=1), behind)

    def round_pages(self, part: int, index: int) -> NDArray[np.int64]:
        """The pages that one reading reads in a round."""
        return self.readings[part].pages[self.ends[index, part] : self.ends[index + 1, part]]


def round_ends(readings: Sequence[Reading], room_pages: int | None = None) -> NDArray[np.int64]:
    """How many pages each reading has read before each round, and in the end.

    A reading's first round is as large as it wants, split if room is short. Each later round is one microbatch.

    room_pages   as in `ReadingWave.of`
    returns      [rounds + 1, readings]
    """
    lengths = np.array([len(reading.pages) for reading in readings], dtype=np.int64)
    microbatch = np.array([reading.microbatch_pages for reading in readings], dtype=np.int64)
    first_round = np.array([reading.first_round for reading in readings], dtype=np.int64)
    most = lengths
    if room_pages is not None:
        of_one = room_pages // (MICROBATCHES_IN_FLIGHT * len(readings))
        most = np.maximum(of_one // microbatch, 1) * microbatch
    ends = [np.zeros_like(lengths)]
    while (ends[-1] < lengths).any():
        asked = np.maximum(first_round - ends[-1], microbatch)
        ends.append(np.minimum(ends[-1] + np.minimum(asked, most), lengths))
    return np.stack(ends)


def kept_share(lse: Tensor, log_rest: Tensor) -> float:
    """P_acc (line 16) of the head of a group that has read the least of its weight.

    lse        [group]   of everything read, the retained set included
    log_rest   [group]   of the unread pages
    """
    return float(torch.sigmoid(lse.double() - log_rest.double()).nan_to_num(nan=0.0).min())
