"""What `ranking.py` launches on a GPU, in plain torch, for the emulated device: the references, a row after another."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.code_scores import reference as code_scores
from vllm_hybrid_sparse.kernels.copy.reference import packed_together
from vllm_hybrid_sparse.kernels.key_codes.reference import encode_keys, pack_codes
from vllm_hybrid_sparse.kernels.listed_attention import reference as listed_attention
from vllm_hybrid_sparse.kernels.listed_attention.state import HostStore, Tally
from vllm_hybrid_sparse.kernels.merge.reference import merge_states
from vllm_hybrid_sparse.kernels.merge.reference import merge_with_unread as merge_all
from vllm_hybrid_sparse.kernels.page_directory import reference as directory
from vllm_hybrid_sparse.kernels.page_directory.state import Listed
from vllm_hybrid_sparse.kernels.reading import reference as reading
from vllm_hybrid_sparse.kernels.reading.plan import PageTables, RankedPages, ReadingPlan
from vllm_hybrid_sparse.policy.selectors import group_scores, rank_pages
from vllm_hybrid_sparse.values import PAGE_TOKENS

__all__ = [
    "attend_listed",
    "directory",
    "encode_pages",
    "merge_with_unread",
    "order_pages",
    "plan_reading",
    "read_on",
    "score_codes",
]


def encode_pages(
    host: Tensor, page_offsets: Tensor, places: Tensor, codes: Tensor, *, head_dim: int, code_bits: int
) -> None:
    """Make the codes of full pages; see kernels/key_codes/gpu.py."""
    pack = packed_together(host.dtype)
    elements = host[page_offsets[:, None] + torch.arange(PAGE_TOKENS * head_dim)]
    keys = elements.view(-1, head_dim // pack, PAGE_TOKENS, pack).transpose(1, 2).reshape(-1, head_dim)
    codes[places] = pack_codes(encode_keys(keys, code_bits), keys.element_size())


def score_codes(
    query: Tensor, codes: Tensor, blocks: Tensor, candidates: Tensor, **numbers: Any
) -> code_scores.CodeScores:
    """What candidates are estimated to weigh; see kernels/code_scores."""
    weights, deviations = code_scores.score_codes(query, codes, blocks, candidates, **numbers)
    return code_scores.CodeScores(weights.float(), deviations.float())


def order_pages(
    scores: Tensor,
    kv_heads: int,
    retained_lse: Tensor,
    deviations: Tensor | None,
    most: int,  # noqa: ARG001  (all are)
) -> Tensor:
    """Candidates by group score, [rows, kv_heads, candidates] int64."""
    rows, q_heads, num = scores.shape
    order = torch.zeros(rows, kv_heads, num, dtype=torch.int64)
    for row, head, heads in _groups(rows, kv_heads, q_heads):
        of_group = scores[row, heads]
        listed = of_group[:, of_group[0] > -torch.inf]
        allowed = None if deviations is None else deviations[row, heads].numpy()
        ranked = rank_pages(group_scores(listed.numpy(), retained_lse[row, heads].numpy(), allowed))
        order[row, head, : len(ranked)] = torch.from_numpy(ranked)
    return order


def attend_listed(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    host: HostStore,
    listed: Listed,
    counts: Tensor,
    tally: Tally,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend to the pages listed; see kernels/listed_attention/gpu.py."""
    out, lse = listed_attention.attend_listed(query, k_pool, v_pool, host, listed, counts, scale=scale)
    slots = listed.slots[torch.arange(listed.slots.shape[2]) < counts[..., None]]
    tally.numbers[:3] += torch.tensor([len(slots), int((slots >= 0).sum()), int((slots < -1).sum())])
    return out.float(), lse.float()


def plan_reading(pages: RankedPages, retained_lse: Tensor, *, threshold: float, microbatch_pages: int) -> ReadingPlan:
    """Say how many pages each group reads at first; see kernels/reading/gpu.py."""
    rows, q_heads, _ = pages.scores.shape
    kv_heads = pages.order.shape[1]
    plan = ReadingPlan(
        counts=torch.zeros(rows, kv_heads, dtype=torch.int32),
        log_unread=torch.full((rows, q_heads), -torch.inf),
        kept=torch.ones(rows, kv_heads),
    )
    for row, head, heads in _groups(rows, kv_heads, q_heads):
        scores, order, budget = _of_group(pages, row, head, heads)
        planned = reading.plan_reading(
            scores, order, retained_lse[row, heads].double(), budget, threshold, microbatch_pages
        )
        plan.counts[row, head], plan.kept[row, head] = planned.num_pages, planned.share
        plan.log_unread[row, heads] = planned.log_unread.float()
    return plan


def read_on(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    host: HostStore,
    pages: RankedPages,
    tables: PageTables,
    retained_lse: Tensor,
    read: tuple[Tensor, Tensor],
    plan: ReadingPlan,
    tally: Tally,
    *,
    scale: float,
    threshold: float,
    microbatch_pages: int,
) -> None:
    """Look at what was read, and read on; see kernels/reading/gpu.py."""
    rows, q_heads, head_dim = query.shape
    kv_heads = pages.order.shape[1]
    for row, head, heads in _groups(rows, kv_heads, q_heads):
        candidates = int(pages.candidates[row])
        if not candidates:
            continue
        scores, order, budget = _of_group(pages, row, head, heads)
        count = int(plan.counts[row, head])

        def attend(
            some: Sequence[int], row: int = row, head: int = head, heads: slice = heads
        ) -> tuple[Tensor, Tensor]:
            keys, values = [k_pool[:0, 0]], [v_pool[:0, 0]]
            for page, slot in _places(tables, host.pages_per_block, row, head, some):
                key, value = (
                    (k_pool[slot], v_pool[slot]) if slot >= 0 else listed_attention.page_of(host, head, page, head_dim)
                )
                keys.append(key)
                values.append(value)
            weights = scale * query[row, heads].double() @ torch.cat(keys).double().T
            return weights.softmax(dim=-1) @ torch.cat(values).double(), weights.logsumexp(dim=-1)

        had = read[0][row, heads].double(), read[1][row, heads].double()
        planned = reading.Planned(count, plan.log_unread[row, heads].double(), float(plan.kept[row, head]))
        result = reading.read_on(
            lambda some, had=had, first=order[:count], attend=attend: had if some == first else attend(some),  # type: ignore[misc]
            scores,
            order,
            retained_lse[row, heads].double(),
            planned,
            budget,
            threshold,
            microbatch_pages,
        )
        read[0][row, heads], read[1][row, heads] = result.out.float(), result.lse.float()
        plan.counts[row, head], plan.kept[row, head] = result.num_pages, result.share
        plan.log_unread[row, heads] = result.log_unread.float()
        further = order[count : result.num_pages]
        hits = sum(slot >= 0 for _, slot in _places(tables, host.pages_per_block, row, head, further))
        looks = (count > 0) + -(-len(further) // microbatch_pages)
        stops = int(result.num_pages < candidates)
        tally.numbers += torch.tensor([len(further), hits, 0, 1, stops, looks])
        tally.kept += result.share


def merge_with_unread(
    retained: tuple[Tensor, Tensor],
    read: tuple[Tensor, Tensor],
    log_unread: Tensor | None,
    share: float,
    output: Tensor,
) -> None:
    """Fold both states, and let the second stand for what is unread; see kernels/merge/gpu.py."""
    merged, _ = merge_states(*retained, *read)
    if log_unread is not None:
        has_read = (read[1] > -torch.inf)[..., None]
        merged = torch.where(has_read, merge_all(*retained, *read, log_unread, share), merged)
    output.copy_(merged)


def _groups(rows: int, kv_heads: int, q_heads: int) -> list[tuple[int, int, slice]]:
    """Every KV head of every row, and its query heads."""
    size = q_heads // kv_heads
    return [(row, head, slice(head * size, (head + 1) * size)) for row in range(rows) for head in range(kv_heads)]


def _of_group(pages: RankedPages, row: int, head: int, heads: slice) -> tuple[Tensor, list[int], int]:
    """Scores [group, candidates] f64, the order, and the budget."""
    candidates = int(pages.candidates[row])
    order: list[int] = pages.order[row, head, :candidates].tolist()
    return pages.scores[row, heads, :candidates].double(), order, int(pages.budgets[row])


def _places(
    tables: PageTables, pages_per_block: int, row: int, head: int, candidates: Sequence[int]
) -> list[tuple[int, int]]:
    """Where some candidates of a group lie: the page of the host store, and the slot; below 0: in none."""
    first = tables.first_entry + head * tables.store_pages
    places = []
    for page in (tables.first_page + candidate for candidate in candidates):
        lies = int(tables.blocks[row, page // pages_per_block]) * pages_per_block + page % pages_per_block
        places.append((lies, int(tables.slots[first + lies])))
    return places
