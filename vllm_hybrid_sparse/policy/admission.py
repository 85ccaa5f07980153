"""Which requests may run side by side: those whose working sets of one step fit the device together.

PSA (section 4, "Request Scheduling"): to run, a request does not need all its KV cache on the device, only the pages of
one iteration of progressive attention. If more requests run than fit, a step evicts what the next one wants, and pages
are copied again for every token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet, SelectionSpec


class RequestLength(NamedTuple):
    """Tokens of a request."""

    prompt: int
    most: int  # that it may come to, prompt and answer together


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The rule.

    Every layer wants the same number of pages. So one layer's share of the pool stands for all layers, whether they
    share the slots or each has a part. Pages of a common prefix are counted for each request that shares them.
    """

    retained: RetainedSet
    selection: SelectionSpec | None  # None: the device reads the retained set alone
    kv_heads: int  # of a layer, in one worker
    layer_pages: int  # the pool's slots / layers
    resident_pages: int = 0  # the most of layer_pages that whole contexts take; 0: none is resident
    block_pages: int = 1  # whole contexts take whole blocks of so many pages

    def working_set_pages(self, tokens: int) -> int:
        """Pages of one layer that a decode step of a request begins with, at this length or any below it.

        For each KV head these are the retained set and at most two microbatches of candidates. How many more a
        progressive step reads is not known beforehand; they go through the slots of the second microbatch.
        """
        first_page, end_page = self.retained.candidate_range(tokens)
        retained_pages = (self.retained.sink_tokens + self.retained.window_tokens) // PAGE_TOKENS + 1
        selected_pages = 0
        if self.selection is not None:
            selected_pages = min(self.selection.budget_pages(end_page - first_page), self.selection.pages_in_flight)
        return self.kv_heads * min(ceil(tokens / PAGE_TOKENS), retained_pages + selected_pages)

    def admits(self, running: Sequence[RequestLength], length: RequestLength) -> bool:
        """Whether a request may join those that run.

        If none runs, any request may: its groups are then read one after another.
        """
        return not running or self._fit([*running, length])

    def _fit(self, lengths: Sequence[RequestLength]) -> bool:
        """Whether the pool holds these requests together.

        In order, each request whose whole context still fits into the resident pages counts as resident, and the
        working sets of the others need the rest of the pool. One of the others is resident too while it is short
        enough, so it takes all resident pages that are left, unless its prompt alone is too long. (As it grows, it may
        also take pages of requests before it. Until it has outgrown the resident pages, the pool is then too small.)
        """
        resident_pages = needed = 0
        for length in lengths:
            whole = self._whole_pages(length.most)
            if resident_pages + whole <= self.resident_pages:
                resident_pages += whole
            else:
                needed += self.working_set_pages(length.most)
                if self._whole_pages(length.prompt) <= self.resident_pages:
                    resident_pages = self.resident_pages
        return needed <= self.layer_pages - resident_pages

    def _whole_pages(self, tokens: int) -> int:
        """Pages of one layer that the whole context of a request takes if it is resident."""
        return self.kv_heads * self.block_pages * ceil(tokens / (self.block_pages * PAGE_TOKENS))
