"""When two backends' answers count as the same."""

from typing import Any

import pytest

from benchmarks.gpu_serving import ALL_SALIENT, CASES, NEARLY_ALL, VOCABULARY, compare, prompts
from vllm_hybrid_sparse.config import HybridSparseConfig

LIKELY = [[4, -0.1], [5, -0.2], [6, -3.0]]


def answer(*tokens: int) -> list[Any]:
    return [[token, LIKELY] for token in tokens]


@pytest.mark.parametrize(
    ("ours", "line", "fine"),
    [
        ((4, 4), "request 0: equal", True),
        ((4, 5), "request 0: place 1: tokens 4 and 5, 0.100 apart in the baseline, a tie", True),
        ((6, 4), "request 0: place 0: tokens 4 and 6, 2.900 apart in the baseline, WRONG", False),
        ((7, 4), "request 0: place 0: token 7 is none of the baseline's 5 most likely, WRONG", False),
    ],
)
def test_answers_are_equal_tie_or_are_wrong(ours: tuple[int, ...], line: str, fine: bool) -> None:
    assert compare([answer(4, 4)], [answer(*ours)], tie=0.15) == ([line], fine)


def test_what_follows_a_tie_is_not_compared() -> None:
    lines, fine = compare([answer(4, 4), answer(4, 4)], [answer(5, 7), answer(4, 4)], tie=0.15)
    assert fine
    assert [line.split(": ")[1] for line in lines] == ["place 0", "equal"]


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
