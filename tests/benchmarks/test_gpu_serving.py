"""When answers count as right."""

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_answers import (
    EXACT,
    NEW_TOKENS,
    NOISE,
    VOCABULARY,
    Verdict,
    compare,
    most_error,
    prompts,
    right_answers,
    write_model,
)
from benchmarks.gpu_serving import ALL_SALIENT, CASES, NEARLY_ALL
from vllm_hybrid_sparse.config import HybridSparseConfig

LIKELY = [[4, -0.1], [5, -0.2], [6, -3.0]]


def answer(*tokens: int, off: float = 0.0) -> list[Any]:
    return [[token, [[one, weight + off] for one, weight in LIKELY]] for token in tokens]


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (answer(4, 4), Verdict(1, 0.0, 0.0, "")),
        (answer(4, 4, off=0.25), Verdict(1, 0.25, 0.0, "")),
        (answer(4, 5), Verdict(0, 0.0, 0.1, "")),
        (answer(6, 4), Verdict(0, 0.0, 2.9, "")),
        ([*answer(5), *answer(4, off=7.0)], Verdict(0, 0.0, 0.1, "")),  # after a different token the texts differ
        (answer(7, 4), Verdict(0, 0.0, math.inf, "request 0, place 0: token 7 is none of the 5 most likely")),
    ],
)
def test_how_far_answers_are_from_the_right_ones(ours: list[Any], verdict: Verdict) -> None:
    assert compare([answer(4, 4)], [ours]) == pytest.approx(verdict)


def test_the_largest_error_of_all_requests_counts() -> None:
    ours = [answer(4, 4), answer(4, 5, off=-0.5), answer(4, 4, off=0.1)]
    assert compare([answer(4, 4)] * 3, ours) == pytest.approx(Verdict(2, 0.5, 0.1, ""))


def test_in_float32_answers_are_exact_whatever_the_baseline_does() -> None:
    theirs = Verdict(1, 0.5, 3.0, "")
    assert most_error("float32", theirs) == EXACT
    assert most_error("bfloat16", theirs) == NOISE * 0.5


def test_right_answers_are_the_most_likely_tokens(tmp_path: Path) -> None:
    write_model(tmp_path, "float32")
    answers = right_answers(tmp_path)
    assert [len(places) for places in answers] == [NEW_TOKENS] * len(prompts())
    for token, likely in (place for places in answers for place in places):
        assert token == likely[0][0]
        assert [weight for _, weight in likely] == sorted((weight for _, weight in likely), reverse=True)
    assert len({token for places in answers for token, _ in places}) > 20, "a model that says one thing shows nothing"


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_exact_and_legal(case: str) -> None:
    settings = HybridSparseConfig.from_mapping({**CASES[case].settings, "device": "cuda"})
    assert settings.policy in ("dense", "fluxion") or (
        (settings.threshold or 0) >= NEARLY_ALL or settings.hgca_beta == ALL_SALIENT
    )


def test_prompts_share_beginnings_and_are_the_same_every_time() -> None:
    made = prompts()
    assert made == prompts()
    assert made[-1] == made[4][:640]
    assert made[5][:1024] == made[4][:1024]
    assert all(0 <= token < VOCABULARY for prompt in made for token in prompt)
