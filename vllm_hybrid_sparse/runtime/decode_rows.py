"""The two-tier rows of one layer's step: what all policies share."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.runtime.device_side import DeviceResult, LayerRows
from vllm_hybrid_sparse.runtime.host_side import HostSide
from vllm_hybrid_sparse.runtime.readings import Reading, ReadingWave
from vllm_hybrid_sparse.runtime.tiered_batch import TieredBatch
from vllm_hybrid_sparse.runtime.tiers import DeviceTier
from vllm_hybrid_sparse.values import PAGE_TOKENS, GroupKey


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """The rows' data, and the device's attention to given pages of theirs."""

    tier: DeviceTier
    host: HostSide
    rows: LayerRows
    queries: Tensor  # [rows, q_heads, head_dim] of the KV dtype, in host memory
    kv_cache: Tensor
    batch: TieredBatch

    @classmethod
    def begin(
        cls,
        tier: DeviceTier,
        host: HostSide,
        scale: float,
        query: Tensor,
        kv_cache: Tensor,
        batch: TieredBatch,
        *,
        score_tokens: int = 0,
    ) -> "DecodeRows":
        """Hand the rows' queries to the device.

        query          [tokens, q_heads, head_dim]   of the step, in host memory
        score_tokens   tokens of each reading whose scores are kept; 0: none
        """
        queries = query[list(batch.rows)]
        rows = LayerRows(
            layer=tier.layer_of(kv_cache),
            source=tier.source(kv_cache),
            scale=scale,
            block_tables=batch.block_tables.numpy(),
            states=tier.device.begin(queries, tier.kv_heads, score_tokens),
        )
        return cls(tier=tier, host=host, rows=rows, queries=queries, kv_cache=kv_cache, batch=batch)

    def beside(self) -> "DecodeRows":
        """The same rows with separate states in which nothing is seen yet."""
        states = self.tier.device.begin(self.queries, self.tier.kv_heads)
        return replace(self, rows=replace(self.rows, states=states))

    def query(self, group: GroupKey) -> Tensor:
        """The group's query heads, [group, head_dim]."""
        return self.queries[group.row, self.rows.states.heads(group)]

    def lse(self, group: GroupKey) -> Tensor:
        """Log-sum-exp of what the device has attended so far, [group]."""
        return self.rows.states.shown_lse[group.row, self.rows.states.heads(group)]

    def groups(self) -> list[GroupKey]:
        """Every KV head of every row."""
        return [GroupKey(row, head) for row in range(len(self.queries)) for head in range(self.tier.kv_heads)]

    def start(self, part: str, pages: Callable[[int], Sequence[int]], microbatch_pages: int) -> Future[DeviceResult]:
        """Have the device attend to pages of each row, the same for all KV heads and layers.

        part    a name of these pages that tells them from the others that the batch's rows read
        pages   gives the pages of a request for its number of tokens
        """
        if part not in self.batch.waves:
            self.batch.waves[part] = self._waves([pages(seq_len) for seq_len in self.batch.seq_lens], microbatch_pages)
        return self.tier.launcher.submit(self.tier.side.run, self.rows, self.batch.waves[part])

    def _waves(self, pages: Sequence[Sequence[int]], microbatch_pages: int) -> list[ReadingWave]:
        of_rows = [np.array(of_row, dtype=np.int64) for of_row in pages]
        readings = [
            Reading(
                group=group,
                pages=of_rows[group.row],
                seq_len=self.batch.seq_lens[group.row],
                microbatch_pages=microbatch_pages,
            )
            for group in self.groups()
            if len(of_rows[group.row])
        ]
        at_once = self.tier.groups_at_once
        return [self.tier.side.wave(readings[first : first + at_once]) for first in range(0, len(readings), at_once)]

    def finish(self, attending: Future[DeviceResult]) -> DeviceResult:
        """Wait for the device. The host attends to pages that could not be loaded; the first failure is logged."""
        result = attending.result()
        for reading, pages, error in result.failed:
            self.tier.report_failure(error)
            scores = self._scores_of(reading, pages)
            table = self.batch.block_tables[reading.group.row]
            kept = None if scores is None else torch.empty(scores.shape)
            state = self.host.attend(self.query(reading.group), self.kv_cache, table, reading, pages, kept)
            if scores is not None and kept is not None:
                scores.copy_(kept)
            self.tier.device.merge(self.rows.states, {reading.group: state})
        return result

    def _scores_of(self, reading: Reading, pages: NDArray[np.int64]) -> Tensor | None:
        """Where the scores of consecutive pages of a reading are kept, [group, pages * 16]; None if they are not."""
        states = self.rows.states
        if states.shown_scores is None:
            return None
        first = int(np.flatnonzero(reading.pages == pages[0])[0]) * PAGE_TOKENS
        of_group = states.shown_scores[reading.group.row, states.heads(reading.group)]
        return of_group[:, first : first + len(pages) * PAGE_TOKENS]
