"""Whether a step of the native kernel did what the references say."""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tests.kernels.asked_once import asked_once
from tests.kernels.served_layer import ServedLayer, Step
from tests.tolerances import CODE_TIE, SCORE_TIE, THRESHOLD_TIE, assert_close
from vllm_hybrid_sparse.kernels.key_codes.reference import encode_keys, estimate_weights
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


def check_step(layer: ServedLayer, step: Step) -> list[str]:
    """Compare every row with the references: the pages read, in their order, and the output.

    Returns the excuses: rows whose pages differ because the reference itself is within rounding of deciding otherwise.
    Their output is still compared, with attention over the pages that were read.
    """
    shape, expected = layer.shape, reference(layer, step)
    excuses = []
    wanted, groups = expected.out, iter(expected.groups)
    rows = torch.tensor(step.query_lens).cumsum(0) - 1
    for index, request in enumerate(step.requests):
        if not step.decode_mask[index]:
            continue
        heads = step.query[rows[index]].reshape(shape.num_kv_heads, -1, shape.head_dim)
        for kv_head, result in enumerate(next(groups)):
            pages = layer.attention.last_plan(index, kv_head)
            if same_pages(pages, result.pages, step):
                continue
            key, value, query = request.key[:, kv_head], request.value[:, kv_head], heads[kv_head]
            where = f"request {index} of {len(key)} tokens, KV head {kv_head}"
            excuse = near_tie(layer, step, query, key, value, pages, result)
            assert excuse, f"{where}: read {pages}, the reference reads {result.pages}"
            excuses.append(f"{where}: {excuse}")
            group = slice(kv_head * len(query), (kv_head + 1) * len(query))
            wanted[rows[index], group] = attend_read(layer, step, query, key, value, pages)
    assert_close(step.output, wanted)
    return excuses


def attend_read(layer: ServedLayer, step: Step, query: Tensor, key: Tensor, value: Tensor, pages: list[int]) -> Tensor:
    """Attention over the retained set and some candidates, to which unread weight may be attributed."""
    shape, first_page, end_page = layer.shape, *step.retained.candidate_range(len(key))
    retained = step.retained.retained_pages(len(key))
    if shape.summary != "key_codes" or not step.selection.attributed or not pages:
        return attend_pages(query, key, value, [*retained, *pages], shape.scale)[0]
    weights = estimate_weights(query, encode_keys(key[16 * first_page : 16 * end_page], shape.code_bits), shape.scale)
    attend = partial(attend_pages, query, key, value, scale=shape.scale)
    return with_unread(attend, attend(retained), pages, weights, first_page, step.selection.attributed)


def tie_of(layer: ServedLayer) -> float:
    """How close the layer's group scores are to the reference's."""
    return CODE_TIE if layer.shape.summary == "key_codes" else SCORE_TIE


def page_scores(layer: ServedLayer, step: Step, query: Tensor, key: Tensor, value: Tensor) -> dict[int, float]:
    """Group score of each candidate page of one KV head of one request."""
    shape = layer.shape
    first_page, end_page = step.retained.candidate_range(len(key))
    candidates = key[16 * first_page : 16 * end_page]
    if shape.summary == "key_codes":
        retained_pages = step.retained.retained_pages(len(key))
        weights = estimate_weights(query, encode_keys(candidates, shape.code_bits), shape.scale)
        _, retained_lse = attend_pages(query, key, value, retained_pages, shape.scale)
        scores = group_scores(weights.numpy(), retained_lse.numpy())
    else:
        summaries = summarize_pages(candidates, shape.summary)
        scores = group_scores(score_pages(query, summaries, shape.scale, shape.summary).numpy())
    return dict(zip(range(first_page, end_page), scores.tolist(), strict=True))


def same_pages(pages: list[int], expected: list[int], step: Step) -> bool:
    """Whether the pages agree: in order if a threshold makes the order count, otherwise in any order, each once."""
    return pages == expected if step.selection.threshold < 1 else sorted(pages) == sorted(expected)


def near_tie(
    layer: ServedLayer,
    step: Step,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: list[int],
    result: ProgressiveResult,
) -> str:
    """Why `pages` may differ from the reference's: tied scores, or P_acc on the threshold. Empty if they may not."""
    scores, tie = page_scores(layer, step, query, key, value), tie_of(layer)
    if len(set(pages)) != len(pages) or not set(pages) <= set(scores):
        return ""
    if step.selection.threshold == 1:
        # There are as many pages, and those that differ are no better and no worse.
        differing = set(pages) ^ set(result.pages)
        spread = max(scores[page] for page in differing) - min(scores[page] for page in differing)
        tied = len(pages) == len(result.pages) and spread < tie
        return f"pages {sorted(differing)} tie within {spread:.1e}" if tied else ""
    pairs = [pair for pair in zip(pages, result.pages, strict=False) if pair[0] != pair[1]]
    if any(abs(scores[page] - scores[expected]) >= tie for page, expected in pairs):
        return ""
    if len(pages) == len(result.pages):
        return f"these tie: {pairs}"
    if step.selection.estimated_remainder:
        rest = sorted(set(scores) - set(pages), key=lambda page: (-scores[page], page))
        return near_estimate(layer, step, query, key, value, pages, rest)
    return near_threshold(pages, result, step)


def near_threshold(pages: list[int], result: ProgressiveResult, step: Step) -> str:
    """Why reading may stop sooner or later than the reference; empty if it may not."""
    decided = min(len(pages), len(result.pages)) // step.selection.microbatch_pages - 1
    if 0 <= decided < len(result.mass) and abs(result.mass[decided].min() - step.selection.threshold) < THRESHOLD_TIE:
        return f"P_acc is on the threshold after microbatch {decided}"
    return ""


def near_estimate(
    layer: ServedLayer, step: Step, query: Tensor, key: Tensor, value: Tensor, pages: list[int], rest: list[int]
) -> str:
    """Why reading by estimates may stop after `pages`, which `rest` follows in order; empty if it may not.

    The reference stops there too if the weights read, beside those unread, may differ by the tie, as a factor: this is
    a threshold whose odds, t / (1 - t), differ by it. Both kinds of looks are then moved, those at what has been read
    and those that say how much more is read at once.
    """
    # The tie of a page's estimate is also that of a sum of them. Of 38,400 groups with other seeds (one and two bits,
    # queries up to six times as long) 3 plans differ in length, all within it. 6 orders lie beyond it: in each of these
    # groups a float32 sum on the edge of two codes has given a page other codes than the reference's.
    shape, first_page, end_page = layer.shape, *step.retained.candidate_range(len(key))
    attend = partial(attend_pages, query, key, value, scale=shape.scale)
    weights = estimate_weights(query, encode_keys(key[16 * first_page : 16 * end_page], shape.code_bits), shape.scale)
    alone = attend(step.retained.retained_pages(len(key)))
    odds = step.selection.threshold / (1 - step.selection.threshold)
    for log_factor in (0.0, -CODE_TIE, CODE_TIE):
        moved = odds * math.exp(log_factor)
        selector = SpecSelector(replace(step.selection, threshold=moved / (1 + moved)))
        if estimated_reading(attend, *alone, [*pages, *rest], weights, selector).pages == pages:
            return f"the reference reads {len(pages)} pages too with the threshold's odds times e^{log_factor}"
    return ""
