"""What the demo says of a server, and when it fails."""

from pathlib import Path

import pytest
import torch

from vllm_hybrid_sparse.cli import demo
from vllm_hybrid_sparse.cli.demo import Outcome, _cores, _dtype_args, _kv_read, _missed
from vllm_hybrid_sparse.cli.haystack import Fact, Haystack
from vllm_hybrid_sparse.cli.server import Server

HAYSTACK = Haystack("text", 1, (Fact("castle", "1"), Fact("museum", "2"), Fact("library", "3")))


def outcome(*found: bool) -> Outcome:
    return Outcome(answers=("",) * len(found), found=found, ttft_s=1.0, tpot_s=1.0, kv_read=1.0)


def test_a_server_whose_metrics_do_not_answer_is_not_reported(tmp_path: Path) -> None:
    assert _kv_read(Server("model", [], {}, tmp_path / "log")) is None


def test_only_what_stock_found_and_ours_did_not_is_missed() -> None:
    assert _missed(HAYSTACK, outcome(True, True, False), outcome(True, False, False)) == ["museum"]
    assert _missed(HAYSTACK, outcome(False, True, True), outcome(True, True, True)) == []


@pytest.mark.parametrize(
    ("cores", "named"),
    [
        ({3}, {"VLLM_CPU_OMP_THREADS_BIND": "3"}),
        ({1, 0}, {"VLLM_CPU_OMP_THREADS_BIND": "0,1"}),
        ({0, 1, 2}, {}),
        (set(range(64)), {}),
    ],
)
def test_cores_are_named_only_where_stock_would_keep_one_of_two(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], named: dict[str, str]
) -> None:
    monkeypatch.setattr(demo.os, "sched_getaffinity", {0: cores}.__getitem__)
    assert _cores() == named


@pytest.mark.parametrize(
    ("gpu", "lacks", "args"), [(False, False, ()), (False, True, ("--dtype", "float32")), (True, True, ())]
)
def test_only_a_cpu_without_bf16_is_shown_in_float32(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, lacks: bool, args: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(demo, "lacks_bf16", lambda: lacks)
    assert _dtype_args() == args
