"""What is kept of a reference's answers: for how long, for which inputs, and whose the answers are."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.asked_once import answers_kept, asked_once, case_of
from vllm_hybrid_sparse.values import RetainedSet

ASKED: list[float] = []


class Answer(NamedTuple):
    total: Tensor
    parts: list[Tensor]


def total(numbers: Tensor, scale: float = 1.0, retained: RetainedSet | None = None) -> Answer:
    del retained
    ASKED.append(scale)
    return Answer(scale * numbers.sum(), [scale * numbers])


@pytest.fixture(autouse=True)
def nothing_asked() -> None:
    ASKED.clear()


def test_the_same_inputs_are_asked_once_in_a_case_and_anew_in_the_next() -> None:
    for case, count in (("one", 1), ("one", 1), ("other", 2), ("one", 3)):
        with answers_kept(case):
            for _ in range(2):
                assert asked_once(total, torch.ones(3)).total == 3
        assert len(ASKED) == count


def test_outside_of_a_case_everything_is_asked() -> None:
    with answers_kept("one"):
        pass
    for _ in range(2):
        asked_once(total, torch.ones(3))
    assert len(ASKED) == 2


def test_inputs_are_told_apart_by_what_they_hold() -> None:
    numbers = torch.arange(6, dtype=torch.float32)
    others = [numbers + 1, numbers.double(), numbers.half(), numbers.reshape(2, 3), numbers.bfloat16()]
    with answers_kept("one"):
        for given in (numbers, *others):
            asked_once(total, given)
        asked_once(total, numbers, 2.0)
        asked_once(total, numbers, scale=2.0)
        for retained in (RetainedSet(sink_tokens=16), RetainedSet(sink_tokens=32)):
            asked_once(total, numbers, retained=retained)
        asked = len(ASKED)
        assert asked == 10
        asked_once(total, torch.stack((numbers, numbers), dim=1)[:, 0])  # the same numbers, strided
        asked_once(total, numbers.clone(), retained=RetainedSet(sink_tokens=32))
        assert len(ASKED) == asked
        numbers[5] = 7.0
        assert asked_once(total, numbers).total == 17


def test_an_answer_that_is_written_to_changes_no_other() -> None:
    with answers_kept("one"):
        for _ in range(3):
            answer = asked_once(total, torch.ones(3))
            assert answer.total == 3
            assert answer.parts[0].tolist() == [1.0, 1.0, 1.0]
            answer.total.zero_()
            answer.parts[0].zero_()
            answer.parts.clear()


def test_inputs_that_cannot_be_told_apart_are_refused() -> None:
    unknown: Any = object()
    with answers_kept("one"), pytest.raises(TypeError, match="object cannot be told apart by what it holds"):
        asked_once(total, torch.ones(3), unknown)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("case", ["one", "other"])
def test_a_case_is_a_test_without_instruction_set_and_threads(
    isa: str, case: str, num_threads: int, request: pytest.FixtureRequest
) -> None:
    assert isa
    assert num_threads
    name = request.node.nodeid.partition("[")[0]
    assert case_of(request.node) == (name, frozenset({("case", repr(case))}))
