"""What the demo reads off a server's log, and when it fails."""

import math

from vllm_hybrid_sparse.cli.demo import Outcome, _kv_read_percent, _missed
from vllm_hybrid_sparse.cli.haystack import Fact, Haystack
from vllm_hybrid_sparse.metrics import DecodeStats

HAYSTACK = Haystack("text", 1, (Fact("castle", "1"), Fact("museum", "2"), Fact("library", "3")))


def outcome(*found: bool) -> Outcome:
    return Outcome(answers=("",) * len(found), found=found, ttft_s=1.0, tpot_s=1.0, kv_read_percent=100.0)


def test_share_of_kv_read_is_taken_over_all_intervals_of_the_log() -> None:
    intervals = [
        DecodeStats(pages_total=10, pages_read=1, total_bytes=1000, read_bytes=100),
        DecodeStats(pages_total=30, pages_read=9, total_bytes=3000, read_bytes=900),
    ]
    log = "\n".join(f"(Worker pid=1) INFO 01-01 00:00:00 [worker.py:1] {stats.describe()}" for stats in intervals)
    assert _kv_read_percent(f"hybrid_sparse: policy=dense\n{log}\nother 5 of 6 bytes\n") == 25.0


def test_log_without_a_report_gives_no_share() -> None:
    assert math.isnan(_kv_read_percent("INFO: Application startup complete.\n"))


def test_only_what_stock_found_and_ours_did_not_is_missed() -> None:
    assert _missed(HAYSTACK, outcome(True, True, False), outcome(True, False, False)) == ["museum"]
    assert _missed(HAYSTACK, outcome(False, True, True), outcome(True, True, True)) == []
