"""What the demo says of a server, and when it fails."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_hybrid_sparse.cli import demo
from vllm_hybrid_sparse.cli.demo import Outcome, _cores, _dtype_args, _exposition, _missed, _print_table
from vllm_hybrid_sparse.cli.haystack import Fact, Haystack
from vllm_hybrid_sparse.cli.kv_read import share_of_kv_read
from vllm_hybrid_sparse.cli.server import Server
from vllm_hybrid_sparse.cli.shown_series import SHOWN_FIELDS, shown_series
from vllm_hybrid_sparse.glue.metric_families import COUNTERS

HAYSTACK = Haystack("text", 1, (Fact("castle", "1"), Fact("museum", "2"), Fact("library", "3")))


def outcome(*found: bool) -> Outcome:
    return Outcome(answers=("",) * len(found), found=found, ttft_s=1.0, tpot_s=1.0, kv_read=1.0)


def test_a_server_whose_metrics_do_not_answer_is_not_reported(tmp_path: Path) -> None:
    exposition = _exposition(Server("model", [], {}, tmp_path / "log"))
    assert exposition == ""
    assert share_of_kv_read(exposition) is None
    assert shown_series(exposition) == []


def test_the_table_ends_with_the_servers_own_series_and_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    exposition = "\n".join(
        f'{family.name}{{engine="{engine}"}} {1000.0 * (index + engine)}'
        for index, family in enumerate(COUNTERS)
        for engine in (0, 1)
    )
    _print_table(outcome(True), replace(outcome(True), series=tuple(shown_series(exposition))))
    heading, *lines = capsys.readouterr().out.splitlines()[-len(SHOWN_FIELDS) - 1 :]
    assert heading.startswith("hybrid_sparse's /metrics")
    values = {family.field: (family.name, f"{2000 * index + 1000:,}") for index, family in enumerate(COUNTERS)}
    assert [tuple(line.split()) for line in lines] == [values[field] for field in SHOWN_FIELDS]


def test_without_series_the_table_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    _print_table(outcome(True), outcome(True))
    assert "/metrics" not in capsys.readouterr().out


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
