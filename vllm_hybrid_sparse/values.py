"""Plain values that the layers exchange; no torch, no vllm."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from vllm_hybrid_sparse.errors import ConfigError

PAGE_TOKENS = 16
"""Tokens of a page. The native page layout has one vector lane per token, so this is a constant, not a setting."""

MAX_HEAD_DIM = 512
"""Largest head dimension that the CPU kernels take; they take every multiple of 16 up to it (`head_dim_fits`)."""

_HEAD_DIM_STEP = 16

SUMMARY_VECTORS = {"minmax": 2, "cuboid_mean": 1, "key_codes": 0, "split_codes": 0, "none": 0}
"""Vectors of `head_dim` values that each kind of summary keeps of a page: minmax (max, min), cuboid_mean (centre).

key_codes keeps no vectors but one or two bits per dimension of each key. split_codes keeps the same two bits in two
parts, so that the signs of all pages can be read without the rest. `none` keeps nothing, for policies that score no
pages."""

CODE_BITS = (1, 2)
"""Bits per dimension that key codes may have."""

SPLIT_HEAD_DIM = 32
"""Split codes need a head dimension that is a multiple of this; others would take more bytes than in one piece."""

UNREAD_ATTRIBUTED = 0.5
"""Default of the setting `unread_attributed`; Fluxion's budgets are made for it, too."""

MICROBATCHES_IN_FLIGHT = 2
"""On a device a group has one microbatch that is attended and one that is loaded meanwhile (PSA, section 3.3)."""

_CACHE_LINE_BYTES = 64
_MOST_SUMMARY_SHARE = 0.08  # of keys and values in two bytes an element

_RATIO_SLACK_PAGES = 1e-9
"""`ratio * candidates` may exceed a whole number by this much without costing a page: 0.07 * 100 is
7.000000000000001."""


def head_dim_fits(head_dim: int, most: int = MAX_HEAD_DIM) -> bool:
    """Whether it is a multiple of 16, at least 16 and at most `most`."""
    return head_dim % _HEAD_DIM_STEP == 0 and _HEAD_DIM_STEP <= head_dim <= most


def head_dim_rule(most: int = MAX_HEAD_DIM) -> str:
    """What a head dimension must be, to be said where it does not fit."""
    return f"must be a multiple of {_HEAD_DIM_STEP}, {_HEAD_DIM_STEP} to {most}"


def summary_bytes(summary: str, head_dim: int, element_bytes: int, code_bits: int) -> int:
    """Bytes of the summary of one page of one KV head, a multiple of 16 elements.

    For key_codes first come code_bits for every dimension of 16 keys, in whole cache lines. Then come four bits per
    dimension of their mean, a byte for each key, two bf16 numbers and one byte, together in whole cache lines again.
    Half a line of padding less is enough for elements of two bytes where this would be more than 8 % of the keys and
    values. split_codes take whole lines; `fine_bytes` of them are the part that is read of few pages only.
    """
    if summary not in ("key_codes", "split_codes"):
        return SUMMARY_VECTORS[summary] * head_dim * element_bytes
    codes = _multiple(PAGE_TOKENS * head_dim * code_bits // 8, _CACHE_LINE_BYTES)
    rest = head_dim // 2 + PAGE_TOKENS + 5
    whole = codes + _multiple(rest, _CACHE_LINE_BYTES)
    if (
        summary == "key_codes"
        and element_bytes == 2
        and whole > _MOST_SUMMARY_SHARE * 2 * PAGE_TOKENS * head_dim * element_bytes
    ):
        return codes + _multiple(rest, _CACHE_LINE_BYTES // 2)
    return whole


def fine_bytes(summary: str, head_dim: int) -> int:
    """How many of the summary_bytes of split codes are the fine part, the second bits; 0 for other summaries."""
    return PAGE_TOKENS * head_dim // 8 if summary == "split_codes" else 0


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedSet:
    """The tokens that every decode row attends to under any policy: the first and the latest of the request.

    A page is retained as a whole. A candidate lies wholly outside both parts, so a page that the recent window only
    touches is retained too.
    """

    sink_tokens: int = 64  # first tokens; a multiple of 16, >= 0
    window_tokens: int = 256  # latest tokens, including the current one; a multiple of 16, >= 16

    def __post_init__(self) -> None:
        if self.sink_tokens < 0 or self.sink_tokens % PAGE_TOKENS:
            raise ConfigError(f"sink_tokens={self.sink_tokens}: must be a multiple of {PAGE_TOKENS}, 0 or more")
        if self.window_tokens < PAGE_TOKENS or self.window_tokens % PAGE_TOKENS:
            raise ConfigError(
                f"window_tokens={self.window_tokens}: must be a multiple of {PAGE_TOKENS}, {PAGE_TOKENS} or more"
            )

    def candidate_range(self, seq_len: int) -> tuple[int, int]:
        """Candidate pages of a request of `seq_len` tokens as `(first_page, end_page)`, excluding the end.

        A page p is a candidate if p >= sink_tokens / 16 and 16 p + 16 <= seq_len - window_tokens. A short request has
        no candidates: then end_page == first_page, which may lie beyond its last page.
        """
        first_page = self.sink_tokens // PAGE_TOKENS
        end_page = max(first_page, (seq_len - self.window_tokens) // PAGE_TOKENS)
        return first_page, end_page

    def retained_pages(self, seq_len: int) -> list[int]:
        """Every page of the request that is not a candidate, ascending; the last one may be partly filled."""
        first_page, end_page = self.candidate_range(seq_len)
        num_pages = math.ceil(seq_len / PAGE_TOKENS)
        return [*range(min(first_page, num_pages)), *range(min(end_page, num_pages), num_pages)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSpec:
    """A policy as the kernels take it: an order over the candidate pages and a rule for where to stop.

    Reading stops at the last candidate, at the budget, or after a whole microbatch if every query head of the group
    exceeds the threshold, whichever comes first. The defaults read everything in the order of the request (`dense`).
    Without a threshold a kernel may read the same pages in another order.
    """

    ranked: bool = False  # True: by group score, descending, ties by the lower page; False: all, by page
    budget_ratio: float = 1.0  # most pages, as a share of the candidates, rounded up; in (0, 1]
    max_pages: int | None = None  # most pages, as a number >= 1; None: no limit
    threshold: float = 1.0  # stop once P_acc > threshold (PSA, Algorithm 1, line 17); in (0, 1], 1: never
    microbatch_pages: int = 8  # pages between two checks of the threshold (PSA's m); >= 1
    # What the unread pages weigh in P_acc. True: the sum of their estimates, which only key codes give; then the
    # threshold is checked only when the estimates say that enough is read. False: each unread page weighs as much as
    # the lightest page read (PSA).
    estimated_remainder: bool = False
    # Share, in [0, 1], of the unread pages' estimated weight that goes to the candidates read: their state counts for
    # more in the merge. The rest is left out. In the papers, and without key codes, all of it is left out.
    attributed: float = 0.0
    # From how many requests on the pages that they begin with in common are attended to exactly, once for all of them,
    # as if they belonged to the retained set; None: with a threshold, where that takes less time. Two are enough for
    # rows that read everything anyway. 0: never, for these neither. The CPU kernel alone does this.
    prefix_sharers: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.budget_ratio <= 1:
            raise ConfigError(f"budget_ratio={self.budget_ratio}: must be in (0, 1]")
        if self.max_pages is not None and self.max_pages < 1:
            raise ConfigError(f"max_pages={self.max_pages}: must be 1 or more")
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"threshold={self.threshold}: must be in (0, 1]")
        if self.microbatch_pages < 1:
            raise ConfigError(f"microbatch_pages={self.microbatch_pages}: must be 1 or more")
        if not 0 <= self.attributed <= 1:
            raise ConfigError(f"attributed={self.attributed}: must be in [0, 1]")
        if self.prefix_sharers is not None and (self.prefix_sharers < 0 or self.prefix_sharers == 1):
            raise ConfigError(f"prefix_sharers={self.prefix_sharers}: must be 0 or 2 or more")
        if not self.ranked and (self.budget_ratio < 1 or self.max_pages is not None or self.threshold < 1):
            raise ConfigError(f"ranked={self.ranked}: must be True where a budget or a threshold stops the reading")

    @property
    def pages_in_flight(self) -> int:
        """The number of pages of one group that a device must hold at one time: those of the microbatches in flight."""
        return MICROBATCHES_IN_FLIGHT * self.microbatch_pages

    @property
    def stops_by_estimates(self) -> bool:
        """Whether a threshold ends the reading by what is estimated to be unread.

        The order of the pages then allows for errors of the estimates (`policy/selectors.py`).
        """
        return self.estimated_remainder and self.threshold < 1

    def budget_pages(self, num_candidates: int) -> int:
        """The most pages that one group may read of `num_candidates`: min(ceil(ratio * n), max_pages, n); 0 of 0.

        1e-9 is subtracted before rounding up, so that 7 % of 100 pages are 7 and not 8. With candidates the result is
        at least one page.
        """
        if num_candidates <= 0:
            return 0
        budget = max(1, math.ceil(self.budget_ratio * num_candidates - _RATIO_SLACK_PAGES))
        limit = num_candidates if self.max_pages is None else self.max_pages
        return min(budget, limit, num_candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRanking:
    """What ranks the pages: a kind of summary."""

    summary: str = "key_codes"
    code_bits: int | None = CODE_BITS[-1]  # of key codes; None with another summary


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionSpec:
    """Fluxion's rule for what a head reads: as many of the best blocks as a predictor says."""

    predictor: str | None = None  # path of its file; None: the shipped one
    granularity: int = 0  # tokens of a logical block, 16, 32, 64 or 128; 0: those of the least volume (eq. 3)
    dense_tokens: int = 0  # sequences of at most this many tokens attend to everything
    ranking: PageRanking = PageRanking()


@dataclass(frozen=True, slots=True, kw_only=True)
class SalienceSpec:
    """HGCA's rule for which entries outside the dense window a query head attends to."""

    beta: float = 1.0  # salient: attention weight above beta / entries; > 0
    alpha: float = 0.1  # share of the latest weights in their moving average; in (0, 1]

    def __post_init__(self) -> None:
        if not (self.beta > 0 and math.isfinite(self.beta)):
            raise ConfigError(f"beta={self.beta}: must be above 0 and finite")
        if not 0 < self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha}: must be in (0, 1]")


class GroupKey(NamedTuple):
    """The query heads that share one KV head, in one decode row of a step: the unit of a task of the device or host."""

    row: int  # decode row of the step, from 0
    kv_head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTask:
    """What one group of one decode row may read of its candidates, which are ranked by now."""

    group: GroupKey
    pages: int  # at most; all that is left to do for the group is to attend to them
    missing: int = 0  # how many of the pages the device does not hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step's decision for one layer: which pages each group may read, and where each group is computed."""

    device: tuple[GroupTask, ...] = ()  # on the device, in this order
    host: tuple[GroupTask, ...] = ()  # on the host, where the pages lie, in this order
    either: tuple[GroupTask, ...] = ()  # on whichever side takes it first, in this order
