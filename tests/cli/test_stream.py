"""What the arrival times of a stream tell."""

import math

import pytest

from vllm_hybrid_sparse.cli.stream import Reply


def test_times_are_the_first_arrival_and_the_median_gap() -> None:
    reply = Reply("abcd", (2.0, 2.1, 2.2, 9.0))
    assert reply.ttft_s == 2.0
    assert reply.tpot_s == pytest.approx(0.1)


def test_one_token_has_no_time_per_output_token() -> None:
    reply = Reply("a", (2.0,))
    assert reply.ttft_s == 2.0
    assert math.isnan(reply.tpot_s)


def test_no_token_has_neither_time() -> None:
    assert math.isnan(Reply("", ()).ttft_s)
    assert math.isnan(Reply("", ()).tpot_s)
