"""Ranked rows: the device chooses their pages itself. It scores, ranks, reads and checks, without the host.

The host launches, and no step waits for the device. Device memory holds the directory of what lies in which slot
(`memory/device_directory.py`). Pages without a slot are read in place from the pinned host store and put into slots on
the way. The device makes key codes from what is stored. So a layer costs the host some launches, whereas a two-tier row
costs it a round trip. This serves page policies that rank by key codes, or read everything (`dense`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.kernels.listed_attention.state import Tally
from vllm_hybrid_sparse.kernels.reading.plan import PageTables, RankedPages
from vllm_hybrid_sparse.memory.device_directory import DeviceDirectory
from vllm_hybrid_sparse.memory.device_pool import DevicePool
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.queues import Mark, current_queue, host_empty, upload
from vllm_hybrid_sparse.memory.step_tensors import StepTensors
from vllm_hybrid_sparse.runtime.ranking_kernels import RankingKernels
from vllm_hybrid_sparse.runtime.step_rows import RankedRows, room_for
from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet, SelectionSpec

ROW_PAGES_AT_ONCE = 2**18
"""The most rows that are computed together, times the pages of the longest: 32 rows of 128K tokens. The scores and
the order of all of them are in memory at once (`ranking_bytes`)."""


def rows_at_once(seq_lens: Sequence[int]) -> list[list[int]]:
    """Which rows of a step are computed together, ascending: all, or rows of similar length if all are too many."""
    pages = [-(-length // PAGE_TOKENS) for length in seq_lens]
    if len(pages) * max(pages, default=0) <= ROW_PAGES_AT_ONCE:
        return [list(range(len(pages)))] if pages else []
    parts: list[list[int]] = []
    for row in sorted(range(len(pages)), key=lambda row: -pages[row]):
        if not parts or (len(parts[-1]) + 1) * pages[parts[-1][0]] > ROW_PAGES_AT_ONCE:
            parts.append([])
        parts[-1].append(row)
    return [sorted(part) for part in parts]


def ranking_bytes(q_heads: int, kv_heads: int) -> int:
    """Device memory that ranked rows take while they are computed, however many there are; counted, not measured.

    For each row and page, including the room that `room_for` adds: scores of all heads, their best, an order with what
    sorting it takes, two lists, and a mark. All of it twice, because captured launches have their own memory.
    """
    pages = ROW_PAGES_AT_ONCE * 9 // 8
    return 2 * pages * (q_heads * 4 + kv_heads * (4 + 3 * 12 + 2 * 12 + 1))


class PageCodes(NamedTuple):
    """Key codes in device memory, and how they are made."""

    codes: Tensor  # [layers, kv_heads, store_pages, summary_bytes] uint8
    head_dim: int
    code_bits: int


class DeviceRanking:
    """Ranked rows in all layers of a model. Only for the step's thread."""

    def __init__(
        self,
        pool: DevicePool,
        sources: Sequence[HostPages],
        spec: SelectionSpec,
        retained: RetainedSet,
        codes: PageCodes | None,
        kernels: RankingKernels,
    ) -> None:
        """An empty directory of the pool's slots.

        sources   every layer's host store, all with the same layout, pinned if there is a GPU
        codes     None: nothing is ranked, and every row reads everything
        """
        first = sources[0]
        self.directory = DeviceDirectory(
            len(sources),
            first.num_kv_heads,
            first.num_pages,
            first.pages_per_block,
            pool.shape.capacity_pages,
            pool.key.device,
            kernels=kernels.directory,
        )
        self._kernels = kernels
        self._pool, self._sources, self._spec, self._retained = pool, sources, spec, retained
        self._codes = codes
        self._hosts = [source.geometry for source in sources]
        self._device = pool.key.device
        self._kv_heads = first.num_kv_heads
        self._tensors = StepTensors(self._device)
        self._places: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # by pages: where they and their codes lie
        self._written_blocks: list[int] = []  # since the last step began, but not by that step
        self._tally = Tally(self._device)
        self._shown = ShownTally(self._tally)
        self._looks = False  # whether rows of the last step were ranked, so that pages may have arrived

    def begin_step(
        self, tables: Sequence[NDArray[np.int32]], seq_lens: Sequence[int], written_pages: Sequence[int]
    ) -> None:
        """Turn the directory over, before anything else that a step asks of it.

        If no row was ranked since the last call, for example because all are resident, this only forgets the written
        pages. That takes a GPU next to nothing.

        tables          [rows][blocks]   of all decode rows of the step; may have more blocks behind
        seq_lens        [rows]           tokens of their requests, the new one included
        written_pages   of the host store, those that prompts write in this step
        """
        self._places.clear()
        of_block = self._sources[0].pages_per_block
        begun = [
            int(table[(length - 1) // PAGE_TOKENS // of_block]) * of_block + (length - 1) // PAGE_TOKENS % of_block
            for table, length in zip(tables, seq_lens, strict=True)
            if length % PAGE_TOKENS == 1
        ]
        elsewhere, self._written_blocks = self._written_blocks, []
        self.directory.begin_step([*written_pages, *begun, *self._pages_of(elsewhere)], arrived=self._looks)
        self._looks = False

    def rows(
        self, tokens: Sequence[int], blocks: Sequence[NDArray[np.int32]], seq_lens: Sequence[int]
    ) -> tuple[RankedRows, ...]:
        """The ranked rows of a step, in parts that are computed one after another.

        tokens     [rows]           of the step's batch
        blocks     [rows][blocks]   of the rows' requests, up to the one that the new token lies in
        seq_lens   [rows]           tokens of the requests, the new one included
        """
        parts = rows_at_once(seq_lens)
        self._looks = self._looks or bool(parts)  # set here, because replayed graphs call no look-up in Python
        return tuple(
            self._part(
                number,
                [tokens[row] for row in part],
                [blocks[row] for row in part],
                [seq_lens[row] for row in part],
            )
            for number, part in enumerate(parts)
        )

    def _part(
        self, number: int, tokens: Sequence[int], blocks: Sequence[NDArray[np.int32]], seq_lens: Sequence[int]
    ) -> RankedRows:
        table = np.zeros((len(blocks), room_for(max(len(of_row) for of_row in blocks))), dtype=np.int32)
        for row, of_row in zip(table, blocks, strict=True):
            row[: len(of_row)] = of_row
        pages = [-(-length // PAGE_TOKENS) for length in seq_lens]
        candidates = [0] * len(pages)
        if self._codes is not None:
            ranges = [self._retained.candidate_range(length) for length in seq_lens]
            candidates = [end - first for first, end in ranges]
        budgets = [self._spec.budget_pages(num) for num in candidates]
        retained = np.array([num - of_row for num, of_row in zip(pages, candidates, strict=True)], dtype=np.int32)
        most_candidates = room_for(max(candidates))
        return RankedRows.place(
            tokens,
            [int(of_row[-1]) for of_row in blocks],
            seq_lens,
            self._sources[0],
            self._tensors,
            number,
            {
                "blocks": table,
                "candidates": np.array(candidates, dtype=np.int32),
                "budgets": np.array(budgets, dtype=np.int32),
                "retained": retained[:, None].repeat(self._kv_heads, axis=1),
            },
            most_retained=room_for(int(retained.max())),
            most_candidates=most_candidates,
            most_budget=min(most_candidates, room_for(max(budgets))),
        )

    def forget_blocks(self, blocks: Sequence[int]) -> None:
        """Forget blocks whose content changes other than by a step, before the next step begins."""
        self._written_blocks += blocks

    def _pages_of(self, blocks: Sequence[int]) -> list[int]:
        of_block = self._sources[0].pages_per_block
        return [block * of_block + page for block in blocks for page in range(of_block)]

    def encode(self, layer: int, pages: Sequence[int]) -> None:
        """Make the codes of full pages of the host store, of all KV heads, on the caller's queue."""
        if self._codes is None or not pages:
            return
        key = tuple(pages)
        if key not in self._places:
            heads, listed = torch.arange(self._kv_heads)[:, None], torch.tensor(key, dtype=torch.int64)[None]
            source = self._sources[0]
            self._places[key] = (
                upload(source.offsets(heads, listed).flatten(), self._device),
                upload((heads * source.num_pages + listed).flatten(), self._device),
            )
        codes, head_dim, code_bits = self._codes
        elements = self._hosts[layer].elements
        of_layer = codes[layer].flatten(0, 1)
        self._kernels.encode_pages(elements, *self._places[key], of_layer, head_dim=head_dim, code_bits=code_bits)

    def encode_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        """Make the codes of all pages of blocks. Codes of pages that are not full are made again once they are."""
        self.encode(layer, self._pages_of(blocks))

    def attend(self, layer: int, query: Tensor, rows: RankedRows, output: Tensor, scale: float) -> None:
        """Launch a layer's attention of the rows. Earlier launches store their new tokens.

        query, output   [tokens, q_heads, head_dim]   of the step; rows of others are left alone
        """
        queries, attended = rows.of(query), rows.of(output)
        args = queries, self._pool.key, self._pool.value, self._hosts[layer]
        first_page = self._retained.sink_tokens // PAGE_TOKENS
        where = rows.blocks, rows.lengths, rows.candidates
        listed = self.directory.look_up(
            layer, *where, rows.retained, None, first_page=first_page, most=rows.most_retained
        )
        retained = self._kernels.attend_listed(*args, listed, rows.retained, self._tally, scale=scale)
        if rows.most_candidates:
            pages = self._ordered(layer, queries, rows, retained[1], scale)
            threshold, microbatch_pages = self._spec.threshold, self._spec.microbatch_pages
            plan = self._kernels.plan_reading(
                pages, retained[1], threshold=threshold, microbatch_pages=microbatch_pages
            )
            listed = self.directory.look_up(
                layer, *where, plan.counts, pages.order, first_page=first_page, most=rows.most_budget
            )
            read = self._kernels.attend_listed(*args, listed, plan.counts, self._tally, scale=scale)
            if self._spec.threshold < 1:
                tables = PageTables(
                    rows.blocks, self.directory.state.slots, first_page, *self.directory.entries_of(layer)
                )
                self._kernels.read_on(
                    *args,
                    pages,
                    tables,
                    retained[1],
                    read,
                    plan,
                    self._tally,
                    scale=scale,
                    threshold=threshold,
                    microbatch_pages=microbatch_pages,
                )
            share = self._spec.attributed
            self._kernels.merge_with_unread(retained, read, plan.log_unread if share else None, share, attended)
        else:
            attended.copy_(retained[0])
        if not rows.together:
            output[rows.index] = attended

    def _ordered(
        self, layer: int, queries: Tensor, rows: RankedRows, retained_lse: Tensor, scale: float
    ) -> RankedPages:
        """Every group's candidates by group score."""
        assert self._codes is not None
        scores, deviations = self._kernels.score_codes(
            queries,
            self._codes.codes[layer],
            rows.blocks,
            rows.candidates,
            first_page=self._retained.sink_tokens // PAGE_TOKENS,
            most=rows.most_candidates,
            pages_per_block=self._sources[0].pages_per_block,
            scale=scale,
            code_bits=self._codes.code_bits,
        )
        allowed = deviations if self._spec.stops_by_estimates else None
        order = self._kernels.order_pages(scores, self._kv_heads, retained_lse, allowed, rows.most_budget)
        return RankedPages(order, scores, rows.candidates, rows.budgets)

    def drop_numbers(self) -> None:
        """Discard all counts of what was read so far, taken or not."""
        self._tally.numbers.zero_()
        self._tally.kept.zero_()
        self._shown.begin_anew()

    def take_numbers(self) -> dict[str, float]:
        """What was read since the last call, as far as it is known without waiting for the device."""
        return self._shown.take()


class ShownTally:
    """A tally as the host sees it: a step or two late."""

    def __init__(self, tally: Tally) -> None:
        device = tally.kept.device
        self._tally = tally
        self._numbers = host_empty(tuple(tally.numbers.shape), torch.int64, device)
        self._kept = host_empty((1,), torch.float64, device)
        self._arrived: Mark | None = None  # behind the copy that is under way
        self._seen = self._taken = self._nothing()

    @staticmethod
    def _nothing() -> dict[str, float]:
        return dict.fromkeys((*Tally.NUMBERS, "kept"), 0.0)

    def begin_anew(self) -> None:
        """Start again from a tally that has been cleared. Waits for a copy that is under way."""
        if self._arrived is not None:
            self._arrived.wait()
            self._arrived = None
        self._seen = self._taken = self._nothing()

    def take(self) -> dict[str, float]:
        """Differences from the last call, as far as they are known. Asks for newer numbers."""
        self._look()
        if self._arrived is None:
            self._numbers.copy_(self._tally.numbers, non_blocking=True)
            self._kept.copy_(self._tally.kept, non_blocking=True)
            self._arrived = current_queue(self._tally.kept.device).mark()
            self._look()
        before, self._taken = self._taken, self._seen
        return {name: value - before[name] for name, value in self._seen.items()}

    def _look(self) -> None:
        if self._arrived is not None and self._arrived.passed():
            numbers = [*self._numbers.tolist(), float(self._kept)]
            self._seen = dict(zip((*Tally.NUMBERS, "kept"), numbers, strict=True))
            self._arrived = None
