"""Which requests may run side by side: those whose working sets of one step fit the device together.

PSA (section 4, "Request Scheduling"): to run, a request does not need all its KV cache on the device, only the pages of
one iteration of progressive attention. If more requests run than fit, a step evicts what the next one wants, and pages
are copied again for every token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet, SelectionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The rule. Lengths are the most tokens that a request may come to, prompt and answer together.

    Every layer wants the same number of pages. So one layer's share of the pool stands for all layers, whether they
    share the slots or each has a part. Pages of a common prefix are counted for each request that shares them.
    """

    retained: RetainedSet
    selection: SelectionSpec | None  # None: the device reads the retained set alone (HGCA)
    kv_heads: int  # of a layer, in one worker
    layer_pages: int  # the pool's slots / layers
    resident_pages: int = 0  # the most of layer_pages that whole contexts take; 0: none is resident

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

    def admits(self, running: Sequence[int], tokens: int) -> bool:
        """Whether a request of this many tokens may join those that run.

        If none runs, any request may: its groups are then read one after another.
        """
        return not running or self._fit([*running, tokens])

    def _fit(self, lengths: Sequence[int]) -> bool:
        """Whether the pool holds these requests together.

        In order, each request whose whole context still fits into the resident pages takes them. The working sets of
        the others need the rest of the pool.
        """
        resident_pages, needed = 0, 0
        for tokens in lengths:
            whole = self.kv_heads * ceil(tokens / PAGE_TOKENS)
            if resident_pages + whole <= self.resident_pages:
                resident_pages += whole
            else:
                needed += self.working_set_pages(tokens)
        return needed <= self.layer_pages - resident_pages
