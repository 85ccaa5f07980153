"""Whether a step of the native kernel did what the references say."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tests.kernels.asked_once import asked_once
from tests.kernels.served_layer import ServedLayer, Step
from tests.tolerances import CODE_TIE, SCORE_TIE, THRESHOLD_TIE, assert_close
from vllm_hybrid_sparse.kernels.key_codes.reference import (
    KeyCodes,
    encode_keys,
    estimate_weights,
    rotation,
    score_deviation,
    unpack_codes,
)
from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import score_pages as native_weights
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.kernels.paged_attention.reference import BatchResult, paged_attention
from vllm_hybrid_sparse.kernels.progressive.reference import ProgressiveResult, estimated_reading, with_unread
from vllm_hybrid_sparse.kernels.score.reference import score_pages
from vllm_hybrid_sparse.kernels.sparse_attention.reference import attend_pages
from vllm_hybrid_sparse.kernels.summarize.reference import summarize_pages
from vllm_hybrid_sparse.policy.selectors import SpecSelector, group_scores


def reference(layer: ServedLayer, step: Step) -> BatchResult:
    """What a step should have done."""
    return asked_once(
        paged_attention,
        step.query,
        [request.key for request in step.requests],
        [request.value for request in step.requests],
        query_lens=step.query_lens,
        decode_mask=step.decode_mask,
        selector=SpecSelector(step.selection),
        retained=step.retained,
        scale=layer.shape.scale,
        summary=layer.shape.summary,
        code_bits=layer.shape.code_bits,
    )


class Group(NamedTuple):
    """The query heads of a row that share a KV head, with what they attend to."""

    query: Tensor  # [group, head_dim]
    key: Tensor  # [seq_len, head_dim]
    value: Tensor  # [seq_len, head_dim]
    codes: KeyCodes | None  # of the candidates; None if pages are not ranked by codes
    weights: Tensor  # [group, candidates] f64, as these estimate; empty without codes
    tie: float  # how close group scores are to those that follow from codes and weights


def group_of(layer: ServedLayer, step: Step, index: int, kv_head: int) -> Group:
    """A group of one of the step's decode rows.

    Where a float32 sum lies on the edge of two codes, or an element of the query on that of two levels, the native
    kernel's codes and estimates differ from the reference's. Those that it can show are checked, and then what follows
    from them is compared.
    """
    shape, request = layer.shape, step.requests[index]
    row = step.query[sum(step.query_lens[: index + 1]) - 1]
    query = row.unflatten(0, (shape.num_kv_heads, -1))[kv_head]
    tensors = query, request.key[:, kv_head], request.value[:, kv_head]
    if shape.summary != "key_codes":
        return Group(*tensors, None, torch.empty(0), SCORE_TIE)
    first_page, end_page = step.retained.candidate_range(len(request.key))
    if isinstance(layer.attention, NativeAttention):
        blocks = [shape.layout.unpack(layer.kv_cache[block], shape.num_kv_heads)[2] for block in request.blocks]
        stored = torch.cat(blocks, dim=1)[kv_head, first_page:end_page]
        codes = unpack_codes(stored, shape.head_dim, shape.code_bits)
        table = torch.tensor(request.blocks, dtype=torch.int32)
        of_row = native_weights(layer.attention, row, layer.kv_cache, table, first_page, end_page)
        weights = of_row.unflatten(0, (shape.num_kv_heads, -1))[kv_head].double()
        errors = (weights - estimate_weights(query, codes, shape.scale)).abs().amax(dim=1)
        assert (errors <= CODE_TIE + 2 * level_of(query, codes, shape.scale)).all(), f"estimates differ by {errors}"
        return Group(*tensors, codes, weights, SCORE_TIE)
    codes = encode_keys(request.key[16 * first_page : 16 * end_page, kv_head], shape.code_bits)
    return Group(*tensors, codes, estimate_weights(query, codes, shape.scale), CODE_TIE)


def level_of(query: Tensor, codes: KeyCodes, scale: float) -> Tensor:
    """How much one level of a query's element may make of a score; [group] f64."""
    unit = (query.double() @ rotation(query.shape[1]).T).abs().amax(dim=1) / 127
    longest = (codes.factor_unit.double()[:, None] * codes.factors.double()).max()
    return scale * unit * longest * (2**codes.bits - 1)


def check_step(layer: ServedLayer, step: Step) -> list[str]:
    """Compare every row with the references: the pages read, in their order, and the output.

    Returns the excuses: rows whose pages differ because the reference itself is within rounding of deciding otherwise.
    Their output is still compared, with attention over the pages that were read.
    """
    expected = reference(layer, step)
    excuses = []
    wanted, groups = expected.out, iter(expected.groups)
    rows = torch.tensor(step.query_lens).cumsum(0) - 1
    for index, request in enumerate(step.requests):
        if not step.decode_mask[index]:
            continue
        plans = [layer.attention.last_plan(index, kv_head) for kv_head in range(layer.shape.num_kv_heads)]
        for kv_head, (pages, result) in enumerate(zip(plans, next(groups), strict=True)):
            if same_pages(pages, result.pages, step):
                continue
            group = group_of(layer, step, index, kv_head)
            where = f"request {index} of {len(request.key)} tokens, KV head {kv_head}"
            excuse = near_tie(layer, step, group, pages, result)
            assert excuse, f"{where}: read {pages}, the reference reads {result.pages}"
            excuses.append(f"{where}: {excuse}")
            q_heads = slice(kv_head * len(group.query), (kv_head + 1) * len(group.query))
            wanted[rows[index], q_heads] = attend_read(layer, step, group, pages)
    assert_close(step.output, wanted)
    return excuses


def attend_read(layer: ServedLayer, step: Step, group: Group, pages: list[int]) -> Tensor:
    """Attention over the retained set and some candidates, to which unread weight may be attributed."""
    query, key, value, codes, weights, _ = group
    scale, (first_page, _) = layer.shape.scale, step.retained.candidate_range(len(key))
    retained = step.retained.retained_pages(len(key))
    if codes is None or not step.selection.attributed or not pages:
        return attend_pages(query, key, value, [*retained, *pages], scale)[0]
    attend = partial(attend_pages, query, key, value, scale=scale)
    return with_unread(attend, attend(retained), pages, weights, first_page, step.selection.attributed)


def page_scores(layer: ServedLayer, step: Step, group: Group) -> dict[int, float]:
    """Group score of each candidate page of one KV head of one request."""
    query, key, value, codes, weights, _ = group
    shape = layer.shape
    first_page, end_page = step.retained.candidate_range(len(key))
    if codes is not None:
        retained_pages = step.retained.retained_pages(len(key))
        deviations = score_deviation(query, codes, shape.scale).numpy() if step.selection.stops_by_estimates else None
        _, retained_lse = attend_pages(query, key, value, retained_pages, shape.scale)
        scores = group_scores(weights.numpy(), retained_lse.numpy(), deviations)
    else:
        summaries = summarize_pages(key[16 * first_page : 16 * end_page], shape.summary)
        scores = group_scores(score_pages(query, summaries, shape.scale, shape.summary).numpy())
    return dict(zip(range(first_page, end_page), scores.tolist(), strict=True))


def same_pages(pages: list[int], expected: list[int], step: Step) -> bool:
    """Whether the pages agree: in order if a threshold makes the order count, otherwise in any order, each once."""
    return pages == expected if step.selection.threshold < 1 else sorted(pages) == sorted(expected)


def near_tie(layer: ServedLayer, step: Step, group: Group, pages: list[int], result: ProgressiveResult) -> str:
    """Why `pages` may differ from the reference's: tied scores, or P_acc on the threshold. Empty if they may not."""
    scores = page_scores(layer, step, group)
    if len(set(pages)) != len(pages) or not set(pages) <= set(scores):
        return ""
    rest = sorted(set(scores) - set(pages), key=lambda page: (-scores[page], page))
    in_order = pages if step.selection.threshold < 1 else sorted(pages, key=lambda page: -scores[page])
    ordered = [scores[page] for page in (*in_order, *rest[:1])]
    if any(later - earlier >= group.tie for earlier, later in pairwise(ordered)):
        return ""
    if len(pages) == len(result.pages):
        return f"these tie: {[pair for pair in zip(pages, result.pages, strict=True) if pair[0] != pair[1]]}"
    if step.selection.threshold == 1:
        return ""
    if step.selection.estimated_remainder:
        return near_estimate(layer, step, group, pages, rest)
    return near_threshold(pages, result, step)


def near_threshold(pages: list[int], result: ProgressiveResult, step: Step) -> str:
    """Why reading may stop sooner or later than the reference; empty if it may not."""
    decided = min(len(pages), len(result.pages)) // step.selection.microbatch_pages - 1
    if 0 <= decided < len(result.mass) and abs(result.mass[decided].min() - step.selection.threshold) < THRESHOLD_TIE:
        return f"P_acc is on the threshold after microbatch {decided}"
    return ""


def near_estimate(layer: ServedLayer, step: Step, group: Group, pages: list[int], rest: list[int]) -> str:
    """Why reading by estimates may stop after `pages`, which `rest` follows in order; empty if it may not.

    The reference stops there too if the weights read, beside those unread, may differ by the tie, as a factor: this is
    a threshold whose odds, t / (1 - t), differ by it. Both kinds of looks are then moved, those at what has been read
    and those that say how much more is read at once.
    """
    # The tie of a page's estimate is also that of a sum of them.
    query, key, value, _, weights, _ = group
    attend = partial(attend_pages, query, key, value, scale=layer.shape.scale)
    alone = attend(step.retained.retained_pages(len(key)))
    odds = step.selection.threshold / (1 - step.selection.threshold)
    for log_factor in (0.0, -CODE_TIE, CODE_TIE):
        moved = odds * math.exp(log_factor)
        selector = SpecSelector(replace(step.selection, threshold=moved / (1 + moved)))
        if estimated_reading(attend, *alone, [*pages, *rest], weights, selector).pages == pages:
            return f"the reference reads {len(pages)} pages too with the threshold's odds times e^{log_factor}"
    return ""
