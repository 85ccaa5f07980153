import pytest

from benchmarks.serving.cases import CASES, FULL_CASES, Case
from benchmarks.serving.tpot import room_tokens


@pytest.mark.parametrize("case", [*CASES, *FULL_CASES], ids=lambda case: case.name)
def test_a_case_alone_has_room_for_the_longest_request_that_its_servers_allow(case: Case) -> None:
    """vLLM ends at start-up otherwise."""
    assert room_tokens([case]) >= case.model_tokens


def test_cases_that_share_servers_have_room_for_the_largest() -> None:
    one, four = (case for case in CASES if case.context_tokens == 8192)

    assert room_tokens([one, four]) == room_tokens([four]) > 4 * 8192
