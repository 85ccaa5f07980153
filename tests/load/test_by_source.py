"""Latencies by what made the requests, with numbers small enough to work out by hand."""

from dataclasses import replace

import pytest

from tests.load.model_server import ModelServer, model_run, record_of
from vllm_hybrid_sparse.load.arrivals import ClosedLoop
from vllm_hybrid_sparse.load.by_source import UNNAMED, SourceFigures, by_source
from vllm_hybrid_sparse.load.exchange import Outcome, Record
from vllm_hybrid_sparse.load.figures import figures
from vllm_hybrid_sparse.load.queueing import Unloaded
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.runner import Run


def record(source: str | None, arrivals: list[tuple[float, int]], outcome: Outcome = Outcome.OK) -> Record:
    return replace(record_of(arrivals, outcome=outcome), source=source)


RECORDS = [
    record("vt", [(1.0, 1), (1.1, 1), (1.4, 1)]),
    record("vt", [(3.0, 1), (3.5, 3)]),
    record("prose", [(7.0, 1)]),
    record("prose", [(9.0, 1), (99.0, 1)], Outcome.FAILED),
    record(None, [(0.5, 1), (0.6, 1)]),
]


def test_each_source_has_the_figures_of_its_own_requests() -> None:
    seen = by_source({"vt": 2, "prose": 3, None: 1}, RECORDS)
    assert list(seen) == [UNNAMED, "prose", "vt"]
    assert (seen["vt"].planned, seen["vt"].answered) == (2, 2)
    assert (seen["vt"].ttft_p50_s, seen["vt"].ttft_p99_s) == (pytest.approx(2.0), pytest.approx(2.98))
    assert (seen["vt"].tbt_p50_s, seen["vt"].tbt_p99_s) == (
        pytest.approx(0.3),
        pytest.approx(0.496),
    )  # of 0.1, 0.3, 0.5
    assert (seen["prose"].planned, seen["prose"].answered) == (3, 1)  # one failed, one was not sent
    assert (seen["prose"].ttft_p99_s, seen["prose"].tbt_p50_s) == (pytest.approx(7.0), None)
    assert seen[UNNAMED].tbt_p99_s == pytest.approx(0.1)


def test_a_source_of_which_nothing_was_answered_has_no_times() -> None:
    seen = by_source({"vt": 2, "prose": 2}, RECORDS[:2])
    assert seen["prose"] == SourceFigures(
        planned=2, answered=0, ttft_p50_s=None, ttft_p99_s=None, tbt_p50_s=None, tbt_p99_s=None
    )


@pytest.mark.parametrize("planned", [{}, {"vt": 2}, {None: 2}, {None: 1, UNNAMED: 1}])
def test_one_source_alone_is_not_told_apart(planned: dict[str | None, int]) -> None:
    assert by_source(planned, RECORDS[:2] if "vt" in planned else RECORDS[4:]) == {}


def test_the_figures_of_several_runs_are_pooled_and_count_what_was_not_sent() -> None:
    requests = [Request(prompt="a", max_tokens=2, source=source) for source in ("vt", "prose", "vt")]
    run = model_run(ModelServer(slots=1, prefill_s=1.0, token_s=0.5), requests, ClosedLoop(1))
    assert run.sources == {"vt": 2, "prose": 1}
    cut_off = Run(run.records[:1], 3, 1.0, True, run.sources)
    seen = figures([run, cut_off], None, Unloaded((), None)).by_source
    assert {name: (one.planned, one.answered) for name, one in seen.items()} == {"vt": (4, 3), "prose": (2, 1)}
    assert seen["prose"].tbt_p50_s == pytest.approx(0.5)
