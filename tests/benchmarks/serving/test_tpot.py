import pytest

from benchmarks.serving.cases import CASES, FULL_CASES, Case, Samples
from benchmarks.serving.tpot import room_tokens, summarise


@pytest.mark.parametrize("case", [*CASES, *FULL_CASES], ids=lambda case: case.name)
def test_a_case_alone_has_room_for_the_longest_request_that_its_servers_allow(case: Case) -> None:
    """Otherwise vLLM ends at start-up."""
    assert room_tokens([case]) >= case.model_tokens


def test_cases_that_share_servers_have_room_for_the_largest() -> None:
    one, four = (case for case in CASES if case.context_tokens == 8192)

    assert room_tokens([one, four]) == room_tokens([four]) > 4 * 8192


def test_what_was_measured_is_summed_up_before_the_rest_is() -> None:
    cases = list(CASES[:2])
    samples = {
        (cases[0].name, "topk", threads, side): Samples(tpot_ms=[time_ms])
        for threads, side, time_ms in (
            ("all", "stock", 30.0),
            ("default", "stock", 20.0),
            ("all", "ours", 10.0),
            ("default", "ours", 40.0),
        )
    }

    (row,) = summarise(samples, cases, ["topk", "dense"])

    assert (row["case"], row["policy"], row["figure"]) == (cases[0].name, "topk", "tpot_ms")
    assert (row["stock_threads"], row["our_threads"], row["stock_over_ours"]) == ("default", "all", 2.0)


def test_a_bar_that_was_not_measured_is_missed() -> None:
    """Its streams never decode together."""
    (case, *_) = (case for case in CASES if case.bar("topk") is not None)
    samples = {
        (case.name, "topk", "all", "stock"): Samples(),
        (case.name, "topk", "all", "ours"): Samples(tpot_ms=[10.0]),
    }
    (row,) = summarise(samples, [case], ["topk"])
    assert row["passed"] is False


def test_a_thread_setting_without_samples_hides_no_other() -> None:
    (case, *_) = CASES
    samples = {
        (case.name, "topk", threads, side): Samples(tpot_ms=times_ms)
        for side in ("stock", "ours")
        for threads, times_ms in (("all", []), ("default", [20.0]))
    }
    (row,) = summarise(samples, [case], ["topk"])
    assert (row["stock_threads"], row["our_threads"], row["stock_over_ours"]) == ("default", "default", 1.0)
