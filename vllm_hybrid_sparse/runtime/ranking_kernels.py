"""The kernels that rank decode rows on the device."""

from typing import Any, Protocol

from torch import Tensor

from vllm_hybrid_sparse.kernels.code_scores.reference import CodeScores
from vllm_hybrid_sparse.kernels.listed_attention.state import HostStore, Tally
from vllm_hybrid_sparse.kernels.page_directory.state import Listed
from vllm_hybrid_sparse.kernels.reading.plan import PageTables, RankedPages, ReadingPlan
from vllm_hybrid_sparse.memory.device_directory import DirectoryKernels

State = tuple[Tensor, Tensor]
"""Partial attention: out [rows, q_heads, head_dim] and log-sum-exp [rows, q_heads], f32."""


class RankingKernels(Protocol):
    """What is launched: `gpu_ranking.py`, or `plain_ranking.py` over CPU memory."""

    @property
    def directory(self) -> DirectoryKernels:
        """The kernels of the directory."""

    def encode_pages(
        self, host: Tensor, page_offsets: Tensor, places: Tensor, codes: Tensor, *, head_dim: int, code_bits: int
    ) -> None:
        """Make the key codes of full pages: kernels/key_codes/gpu.py."""

    def score_codes(
        self, query: Tensor, codes: Tensor, blocks: Tensor, candidates: Tensor, **numbers: Any
    ) -> CodeScores:
        """Estimate the weights of candidates: kernels/code_scores/gpu.py, for queries that are not rotated yet."""

    def order_pages(
        self, scores: Tensor, kv_heads: int, retained_lse: Tensor, deviations: Tensor | None, most: int
    ) -> Tensor:
        """Order the best candidates by group score, at least `most` of them: kernels/score/gpu.py."""

    def attend_listed(
        self,
        query: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        host: HostStore,
        listed: Listed,
        counts: Tensor,
        tally: Tally,
        *,
        scale: float,
    ) -> State:
        """Attend to the pages listed: kernels/listed_attention/gpu.py."""

    def plan_reading(
        self, pages: RankedPages, retained_lse: Tensor, *, threshold: float, microbatch_pages: int
    ) -> ReadingPlan:
        """Say how many pages each group reads at first: kernels/reading/gpu.py."""

    def read_on(
        self,
        query: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        host: HostStore,
        pages: RankedPages,
        tables: PageTables,
        retained_lse: Tensor,
        read: State,
        plan: ReadingPlan,
        tally: Tally,
        *,
        scale: float,
        threshold: float,
        microbatch_pages: int,
    ) -> None:
        """Check what was read, and read on: kernels/reading/gpu.py."""

    def merge_with_unread(
        self, retained: State, read: State, log_unread: Tensor | None, share: float, output: Tensor
    ) -> None:
        """Merge the retained set's state with the candidates': kernels/merge/gpu.py."""
