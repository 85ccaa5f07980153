"""Which requests may run side by side: those whose working sets of one step the device holds together.

PSA (section 4, "Request Scheduling"): a request need not have all its KV cache on the device to run, only the pages of
one iteration of progressive attention. Where more run than that, a step evicts what the next one wants, and pages are
copied again for every token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet, SelectionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The rule. Lengths are tokens of a request, prompt and answer together, at the most that it may come to.

    Layers want as many pages each, so one layer's share of the pool stands for all of them, whether they share its
    slots or have a part each. Pages that requests share by a common prefix are counted for each of them.
    """

    retained: RetainedSet
    selection: SelectionSpec | None  # None: the device reads the retained set alone (HGCA)
    kv_heads: int  # of a layer, in one worker
    layer_pages: int  # the pool's slots / layers

    def working_set_pages(self, tokens: int) -> int:
        """Pages of one layer that a decode step of a request begins with, at this length or any below it.

        Of each KV head the retained set, and of the candidates that may be read two microbatches: how many more a
        progressive step reads is not known before, and these go through the slots of the second one.
        """
        first_page, end_page = self.retained.candidate_range(tokens)
        retained_pages = (self.retained.sink_tokens + self.retained.window_tokens) // PAGE_TOKENS + 1
        selected_pages = 0
        if self.selection is not None:
            selected_pages = min(self.selection.budget_pages(end_page - first_page), self.selection.pages_in_flight)
        return self.kv_heads * min(ceil(tokens / PAGE_TOKENS), retained_pages + selected_pages)

    def admits(self, running: Sequence[int], tokens: int) -> bool:
        """Whether a request of so many tokens may join those that run. Where none runs it may, whatever it needs: its
        groups are read one after another then."""
        needed = sum(map(self.working_set_pages, running)) + self.working_set_pages(tokens)
        return not running or needed <= self.layer_pages
