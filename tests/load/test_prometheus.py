"""Histograms read from the text of /metrics."""

import math

import pytest

from vllm_hybrid_sparse.load.prometheus import QUEUE_TIME, Histogram, histogram, total

TEXT = """# HELP vllm:request_queue_time_seconds Histogram of time spent in WAITING phase for request.
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="a"} 4.0
vllm:request_queue_time_seconds_bucket{engine="0",le="2.0",model_name="a"} 6.0
vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf",model_name="a"} 8.0
vllm:request_queue_time_seconds_bucket{le="0.3",engine="1",model_name="a"} 1.0
vllm:request_queue_time_seconds_bucket{le="2.0",engine="1",model_name="a"} 1.0
vllm:request_queue_time_seconds_bucket{le="+Inf",engine="1",model_name="a"} 2.0
vllm:request_queue_time_seconds_count{engine="0",model_name="a"} 8.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="a"} 99.0
"""


def test_label_sets_are_added_up_and_other_series_left_out() -> None:
    assert histogram(TEXT, QUEUE_TIME) == Histogram((0.3, 2.0, math.inf), (5.0, 7.0, 10.0))


@pytest.mark.parametrize("text", ["", "# nothing\n", 'vllm:request_queue_time_seconds_bucket{le="0.3"} 4.0\n'])
def test_a_text_without_the_whole_histogram_has_none(text: str) -> None:
    assert histogram(text, QUEUE_TIME) is None


@pytest.mark.parametrize(
    ("share", "bounds"),
    [(0.25, (0.0, 0.3)), (0.5, (0.0, 0.3)), (0.51, (0.3, 2.0)), (0.7, (0.3, 2.0)), (0.99, (2.0, math.inf))],
)
def test_a_quantile_is_known_to_lie_in_its_bucket(share: float, bounds: tuple[float, float]) -> None:
    assert Histogram((0.3, 2.0, math.inf), (5.0, 7.0, 10.0)).bucket(share) == bounds


def test_empty_buckets_are_stepped_over() -> None:
    assert Histogram((1.0, 2.0, 3.0, math.inf), (0.0, 0.0, 4.0, 4.0)).bucket(0.5) == (2.0, 3.0)


def test_nothing_observed_lies_in_no_bucket() -> None:
    assert Histogram((1.0, math.inf), (0.0, 0.0)).bucket(0.5) is None


def test_since_counts_what_came_between() -> None:
    before, after = Histogram((1.0, math.inf), (2.0, 3.0)), Histogram((1.0, math.inf), (2.0, 7.0))
    assert after.since(before) == Histogram((1.0, math.inf), (0.0, 4.0))
    assert after.plus(before) == Histogram((1.0, math.inf), (4.0, 10.0))
    with pytest.raises(ValueError, match="not of one series"):
        before.since(after)  # the server began anew
    with pytest.raises(ValueError, match="different buckets"):
        after.plus(Histogram((2.0, math.inf), (0.0, 0.0)))


def test_a_total_adds_label_sets_up_and_leaves_other_names_out() -> None:
    text = 'a_total{x="1 }",y="2"} 3.0\na_total{x="b"} 4 1700000000\na_total_bytes 9\nb_total 1e3\n# a_total 5\n'
    assert total(text, "a_total") == 7.0
    assert total(text, "b_total") == 1000.0
    assert total(text, "c_total") is None
