"""`hybrid-sparse bench` from its options to its report, on small servers in this process."""

import io
import json
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from tests.load.fake_server import FakeServer, Reply, answer_in_full, serving
from vllm_hybrid_sparse.cli.main import main
from vllm_hybrid_sparse.cli.server import free_port
from vllm_hybrid_sparse.load.traces import read_trace

URL = "http://127.0.0.1:1"


def bench(*options: str) -> int:
    return main(["bench", *options])


def report(out: Path) -> dict[str, Any]:
    assert out.with_suffix(".html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    content = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def test_prose_has_the_tokens_asked_for_by_the_server_s_own_count(tmp_path: Path) -> None:
    out = tmp_path / "r"
    with serving() as server:
        options = ("--prose", "60:1,240:1", "--output-tokens", "5", "--requests", "8", "--clients", "2")
        assert bench("--url", server.url, *options, "--out", str(out)) == 0
    (side,) = report(out)["servers"]
    assert side["figures"]["outcomes"] == {"ok": 8}
    assert side["figures"]["output_tokens"] == 40
    for request in side["runs"][0]["requests"]:
        assert min(abs(request["prompt_tokens"] - asked) for asked in (60, 240)) < 12


def test_tasks_are_mixed_with_documents_and_named_in_the_report(tmp_path: Path) -> None:
    text, saved = tmp_path / "one.txt", tmp_path / "saved.jsonl"
    text.write_text("tells of a river and a mill. " * 100)
    tasks = ("--tasks", "niah_single_2:3,niah_multikey_3", "--task-tokens", "400:1,1600:1")
    documents = ("--documents", str(text), "--questions-per-document", "6", "--document-tokens", "90")
    load = ("--clients", "2", "--warm-up", "1", "--save-trace", str(saved), "--out", str(tmp_path / "r"))
    traces = []
    with serving() as server:
        for seed in ("0", "0", "1"):
            assert bench("--url", server.url, *tasks, *documents, *load, "--seed", seed) == 0
            traces.append(read_trace(saved))
    assert traces[0] == traces[1]
    assert {request.prompt for request in traces[0] if request.source != "documents"}.isdisjoint(
        request.prompt for request in traces[2]
    )
    content = report(tmp_path / "r")
    sources = content["trace"]["sources"]
    assert sources["documents"] == 6
    assert sources["niah_single_2"] + sources["niah_multikey_3"] == 32
    assert sources["niah_single_2"] > sources["niah_multikey_3"] > 0
    names = [request.source for request in traces[2]]
    assert len(set(names[:10])) > 1  # in no order of the sources
    assert content["trace"]["groups"] == {"one.txt": 6}
    requests = content["servers"][0]["runs"][0]["requests"]
    assert [request["source"] for request in requests] == names
    for request in requests:
        if request["source"] == "documents":
            assert request["output_tokens"] == 128
        else:
            assert request["output_tokens"] == {"niah_single_2": 12, "niah_multikey_3": 40}[request["source"]]
            assert min(abs(request["prompt_tokens"] / asked - 1) for asked in (400, 1600)) < 0.1


def test_latencies_are_told_by_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": "a b", "max_tokens": 3, "source": "mine"}\n{"prompt": "a b", "max_tokens": 3}\n')
    options = ("--trace", str(trace), "--prose", "40", "--requests", "5", "--output-tokens", "4", "--clients", "1")
    with serving() as server:
        assert bench("--url", server.url, *options, "--warm-up", "1", "--out", str(tmp_path / "r")) == 0
    content = report(tmp_path / "r")
    counts = {name: seen["answered"] for name, seen in content["servers"][0]["figures"]["by_source"].items()}
    asked = [request["source"] for request in content["servers"][0]["runs"][0]["requests"]]
    assert counts == {name or "no source": asked.count(name) for name in asked}
    assert "prose" in counts
    assert "TTFT P50" in capsys.readouterr().out


def test_rounds_of_adjacent_seeds_have_arrivals_of_their_own(tmp_path: Path) -> None:
    due_s = []
    with serving() as server:
        for seed in ("0", "1"):
            options = ("--requests", "4", "--output-tokens", "2", "--rate", "400", "--rounds", "2", "--seed", seed)
            assert bench("--url", server.url, *PROSE, *options, "--out", str(tmp_path / "r")) == 0
            runs = report(tmp_path / "r")["servers"][0]["runs"]
            due_s += [[request["due_s"] for request in run["requests"]] for run in runs]
    assert len({tuple(times) for times in due_s}) == 4
    assert [times[-1] for times in due_s] == [0.01] * 4


def test_two_names_of_one_server_share_no_prefix(tmp_path: Path) -> None:
    with serving() as server:
        sides = ("--url", f"one={server.url}", "--vs", f"other={server.url}/v1")
        options = ("--requests", "3", "--output-tokens", "3", "--clients", "1", "--warm-up", "1")
        assert bench(*sides, *PROSE, *options, "--out", str(tmp_path / "r")) == 0
        asked = [body["prompt"] for body in server.requests if body["max_tokens"] == 3]
    assert len(asked) == len(set(asked)) == 8
    assert len({prompt.partition("\n")[0] for prompt in asked}) == 4  # warm-up and run of both


def test_answers_to_tasks_have_the_tokens_asked_for(tmp_path: Path) -> None:
    tasks = ("--tasks", "all", "--task-tokens", "900", "--output-tokens", "7", "--requests", "5")
    with serving() as server:
        assert bench("--url", server.url, *tasks, "--clients", "2", "--out", str(tmp_path / "r")) == 0
    assert report(tmp_path / "r")["trace"]["max_tokens"] == {"7": 5}


def test_a_length_that_a_task_cannot_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = ("--tasks", "niah_single_1,vt", "--task-tokens", "100", "--clients", "1")
    with serving() as server:
        assert bench("--url", server.url, *tasks, "--out", str(tmp_path / "r")) == 1
    assert re.search(r"task-tokens=100: must be at least \d+ for vt, its shortest prompt", capsys.readouterr().err)


def test_two_measurements_of_a_server_share_no_prefix(tmp_path: Path) -> None:
    with serving() as server:
        for number in range(2):
            options = ("--prose", "40", "--requests", "2", "--output-tokens", "3", "--clients", "1", "--warm-up", "1")
            assert bench("--url", server.url, *options, "--out", str(tmp_path / f"r{number}")) == 0
        asked = [body["prompt"].partition("\n")[0] for body in server.requests if body["max_tokens"] == 3]
    assert len(asked) == 6
    assert len(set(asked)) == 4  # warm-up and run of both measurements


def test_documents_are_read_first_and_two_servers_asked_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for name in ("one.txt", "two.txt"):
        paths.append(tmp_path / name)
        paths[-1].write_text(f"{name} " + "tells of a river and a mill. " * 100)
    with serving() as stock, serving() as ours:
        options = ("--documents", *map(str, paths), "--document-tokens", "90", "--questions-per-document", "3")
        sides = ("--url", f"stock={stock.url}", "--vs", f"ours={ours.url}")
        load = ("--rate", "500", "--rounds", "2", "--output-tokens", "4", "--out", str(tmp_path / "r.html"))
        assert bench(*sides, *options, *load) == 0
        asked = [[body["prompt"] for body in server.requests if body["max_tokens"] == 4] for server in (stock, ours)]
    assert sorted(asked[0]) == sorted(asked[1])
    content = report(tmp_path / "r")
    assert [side["name"] for side in content["servers"]] == ["stock", "ours"]
    assert content["trace"]["groups"] == {"one.txt": 3, "two.txt": 3}
    assert {run["name"] for run in content["servers"][0]["runs"]} == {"round 1", "round 2"}
    assert [ratio["figure"] for ratio in content["ratios"]["ours"]]
    shown = capsys.readouterr()
    assert "ours against stock" in shown.out
    assert "stock: reading one.txt" in shown.err
    assert "sent 6 of 6, running 0, done 6, failed 0" in shown.err


def test_names_that_utf8_cannot_hold_lose_no_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())  # Python's own takes any text, pytest's does not
    text = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))
    text.write_text("tells of a river and a mill. " * 100)
    sizes = ("--questions-per-document", "2", "--output-tokens", "3", "--clients", "1", "--warm-up", "1")
    out, saved = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xe9")), tmp_path / "saved.jsonl"
    with serving() as server:
        files = ("--documents", str(text), "--save-trace", str(saved), "--out", str(out))
        assert bench("--url", server.url, *files, *sizes) == 0
    assert report(out)["trace"]["groups"] == {"caf\udce9.txt": 2}
    assert {request.group for request in read_trace(saved)} == {"caf\udce9.txt"}
    assert "\\udce9.json" in capsys.readouterr().out


def test_a_saved_trace_is_run_again_at_its_own_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = (
        '{"prompt": [1, 2, 3], "max_tokens": 3, "arrival_s": 0.0}',
        '{"prompt": "a b", "max_tokens": 2, "arrival_s": 0.01}',
    )
    trace.write_text("\n".join(lines))
    with serving() as server:
        options = ("--recorded-times", "--save-trace", str(tmp_path / "saved.jsonl"), "--out", str(tmp_path / "r"))
        assert bench("--url", server.url, "--trace", str(trace), *options) == 0
        assert [1, 2, 3] in [body["prompt"] for body in server.requests]
    assert read_trace(tmp_path / "saved.jsonl") == read_trace(trace)
    (run,) = report(tmp_path / "r")["servers"][0]["runs"]
    assert [request["due_s"] for request in run["requests"]] == [0.0, 0.01]


def test_capacity_is_searched_and_every_try_reported(tmp_path: Path) -> None:
    def answer(server: FakeServer, body: dict[str, Any]) -> Reply:
        return Reply([b"full"], status=429) if "overflow" in body["prompt"] else answer_in_full(server, body)

    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": "a b", "max_tokens": 3}\n{"prompt": "overflow", "max_tokens": 3}\n')
    options = ("--capacity", "psa", "--first-rate", "80000", "--tries", "2", "--warm-up", "1", "--iteration-ms", "10")
    with serving(answer) as server:
        assert bench("--url", server.url, "--trace", str(trace), *options, "--out", str(tmp_path / "r")) == 0
    (found,) = report(tmp_path / "r")["capacity"]["servers"]
    assert [one["rate"] for one in found["tries"]] == [8e4, 4e4, 2e4, 1e4]
    for one in found["tries"]:
        assert "1 of 2 requests not answered" in one["broken"]["strict"]
    assert found["capacity"]["strict"]["holds_per_s"] is None


def test_a_search_ends_where_requests_are_refused_for_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(server: FakeServer, body: dict[str, Any]) -> Reply:
        return Reply([b"too long"], status=400) if "overflow" in body["prompt"] else answer_in_full(server, body)

    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": "a b", "max_tokens": 3}\n{"prompt": "overflow", "max_tokens": 3}\n')
    options = ("--capacity", "psa", "--first-rate", "400", "--warm-up", "1", "--iteration-ms", "10")
    with serving(answer) as server:
        assert bench("--url", server.url, "--trace", str(trace), *options, "--out", str(tmp_path / "r")) == 0
    (found,) = report(tmp_path / "r")["capacity"]["servers"]
    assert [one["rate"] for one in found["tries"]] == [400.0]
    assert found["ended"] == "1 of 2 requests are refused at any rate: HTTP 400: too long"
    assert "the search ended: 1 of 2 requests are refused at any rate" in capsys.readouterr().out
    assert "the search ended: 1 of 2" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_prose_beside_documents_is_salted_and_they_are_not(tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_text("tells of a river and a mill. " * 100)
    with serving() as server:
        options = ("--documents", str(text), "--prose", "40", "--requests", "6", "--questions-per-document", "3")
        load = ("--clients", "1", "--rounds", "2", "--output-tokens", "4", "--warm-up", "1")
        assert bench("--url", server.url, *options, *load, "--out", str(tmp_path / "r")) == 0
        asked = [body["prompt"] for body in server.requests][-12:]  # two rounds of six
    documents = [prompt for prompt in asked if "river" in prompt]
    prose = [prompt for prompt in asked if "river" not in prompt]
    assert 0 < report(tmp_path / "r")["trace"]["groups"]["one.txt"] == len(documents) / 2 < 6
    assert not [prompt for prompt in documents if prompt.startswith("Run ")]
    assert all(prompt.startswith("Run ") for prompt in prose)
    assert len({prompt.partition("\n")[0] for prompt in prose}) == 2  # a line for each round


@pytest.mark.parametrize(
    ("load", "status", "run"),
    [
        (("--clients", "1", "--rounds", "2"), 1, "round 1"),
        (("--capacity", "psa", "--first-rate", "400", "--iteration-ms", "10"), 0, "try 1"),
    ],
)
def test_a_server_that_is_lost_between_runs_leaves_the_report_of_those_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], load: tuple[str, ...], status: int, run: str
) -> None:
    def answer(server: FakeServer, body: dict[str, Any]) -> Reply:
        priming = body["max_tokens"] == 1 and len(server.requests) > 5
        return Reply([b"gone"], status=500) if priming else answer_in_full(server, body)

    text = tmp_path / "one.txt"
    text.write_text("tells of a river and a mill. " * 100)
    with serving(answer) as server:
        options = ("--documents", str(text), "--questions-per-document", "3", "--salt", "each-run")
        sizes = ("--output-tokens", "4", "--warm-up", "1", "--out", str(tmp_path / "r"))
        assert bench("--url", server.url, *options, *sizes, *load) == status
    assert "refused before the run (HTTP 500: gone)" in capsys.readouterr().err
    content = report(tmp_path / "r")
    assert [one["name"] for one in content["servers"][0]["runs"]] == [run]
    if content["capacity"] is None:
        assert content["interrupted"]
    else:
        assert "refused before the run" in content["capacity"]["servers"][0]["ended"]


def test_two_recordings_are_run_side_by_side_at_their_own_times(tmp_path: Path) -> None:
    for name, times in (("a", (0.0, 0.02)), ("b", (0.01, 0.03))):
        lines = [json.dumps({"prompt": f"{name} {at}", "max_tokens": 2, "arrival_s": at}) for at in times]
        (tmp_path / name).write_text("\n".join(lines))
    with serving() as server:
        traces = ("--trace", str(tmp_path / "a"), "--trace", str(tmp_path / "b"), "--recorded-times")
        assert bench("--url", server.url, *traces, "--warm-up", "1", "--out", str(tmp_path / "r")) == 0
        sent = [body["prompt"].rpartition("\n")[2] for body in server.requests][-4:]
    assert sent == ["a 0.0", "b 0.01", "a 0.02", "b 0.03"]
    (run,) = report(tmp_path / "r")["servers"][0]["runs"]
    assert [request["due_s"] for request in run["requests"]] == [0.0, 0.01, 0.02, 0.03]


def test_failed_requests_make_the_status_one_and_stay_in_the_report(tmp_path: Path) -> None:
    def answer(server: FakeServer, body: dict[str, Any]) -> Reply:
        return Reply([b"no"], status=500) if "bad" in body["prompt"] else answer_in_full(server, body)

    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": "a", "max_tokens": 3}\n' * 2 + '{"prompt": "a bad one", "max_tokens": 3}\n')
    with serving(answer) as server:
        options = ("--trace", str(trace), "--clients", "1", "--warm-up", "1", "--out", str(tmp_path / "r"))
        assert bench("--url", server.url, *options) == 1
    figures = report(tmp_path / "r")["servers"][0]["figures"]
    assert figures["outcomes"] == {"ok": 2, "refused": 1}


def test_a_key_that_no_header_can_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret\nkey")
    assert bench("--url", URL, *PROSE, "--rate", "1") == 1
    said = capsys.readouterr().err
    assert "OPENAI_API_KEY: must have printable ASCII characters only" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        (("--out", "day"), "out={}/day.json: must be another file than the one that is read there"),
        (("--save-trace", "day.json"), "save-trace={}/day.json: must be another file than the one that is read there"),
        (("--save-trace", "r.html"), "out={}/r.html: must be another file than the one that is written there"),
    ],
)
def test_no_output_takes_the_place_of_another_file(
    outputs: tuple[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "day.json"
    trace.write_text('{"prompt": "a", "max_tokens": 1}\n')
    option, name = outputs
    given = {"--out": str(tmp_path / "r"), option: str(tmp_path / name)}
    pairs = [part for pair in given.items() for part in pair]
    assert bench("--url", URL, "--trace", str(trace), "--rate", "1", *pairs) == 1
    assert said.format(tmp_path) in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [trace]


def test_as_many_connections_are_allowed_as_the_machine_lets_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append((which, limits)))
    with serving() as server:
        options = ("--requests", "1", "--output-tokens", "2", "--clients", "1", "--out", str(tmp_path / "r"))
        assert bench("--url", server.url, *PROSE, *options) == 0
    assert asked == [(resource.RLIMIT_NOFILE, (4096, 4096))]


PROSE = ("--prose", "50")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*PROSE, "--rate", "0"), "rate=0.0: must be above 0"),
        ((*PROSE, "--rate", "-2"), "rate=-2.0: must be above 0"),
        ((*PROSE, "--rate", "nan"), "rate=nan: must be above 0"),
        ((*PROSE, "--capacity", "psa", "--first-rate", "0"), "first-rate=0.0: must be above 0"),
        ((*PROSE,), "rate, clients, recorded-times, capacity: exactly one"),
        ((*PROSE, "--rate", "1", "--clients", "2"), "rate, clients, recorded-times, capacity: exactly one"),
        (("--rate", "1"), "trace, documents, prose, tasks: at least one"),
        ((*PROSE, "--rate", "1", "--requests", "0"), "requests=0: must be at least 1"),
        ((*PROSE, "--rate", "1", "--rounds", "0"), "rounds=0: must be at least 1"),
        ((*PROSE, "--capacity", "psa", "--rounds", "2"), "rounds=2: must be 1 with capacity"),
        ((*PROSE, "--capacity", "psa", "--tries", "0"), "tries=0: must be at least 1"),
        ((*PROSE, "--capacity", "psa", "--tolerance", "0"), "tolerance=0.0: must be above 0"),
        ((*PROSE, "--capacity", "psa", "--iteration-ms", "0"), "iteration-ms=0: must be above 0"),
        ((*PROSE, "--rate", "1", "--goodput", "speed:9"), "goodput=speed:9: names are ttft, tbt, tpot, e2e"),
        ((*PROSE, "--rate", "1", "--extra-body", "["), "extra-body=[: must be JSON"),
        ((*PROSE, "--rate", "1", "--extra-body", "[]"), "extra-body=[]: must be a JSON object"),
        ((*PROSE, "--rate", "1", "--extra-body", "1" * 5000), f"extra-body={'1' * 80}: must be JSON"),
        ((*PROSE, "--rate", "1", "--extra-body", "[" * 100_000), f"extra-body={'[' * 80}: must be JSON"),
        ((*PROSE, "--rate", "1", "--extra-body", '{"n": 2}'), "extra-body=n: must be none of model, prompt, messages"),
        ((*PROSE, "--rate", "1", "--goodput", "ttft:inf"), "goodput=ttft:inf: names are ttft, tbt, tpot, e2e, limits"),
        ((*PROSE, "--rate", "1", "--goodput", "ttft:5,ttft:9"), "goodput=ttft:5,ttft:9: must give ttft once"),
        ((*PROSE, "--rate", "1", "--vs", "nowhere"), "vs=nowhere: must be http://HOST"),
        ((*PROSE, "--rate", "1", "--vs", URL), "servers must differ in name"),
        ((*PROSE, "--rate", "1", "--timeout", "0"), "timeout=0.0: must be above 0"),
        ((*PROSE, "--rate", "1", "--retries", "-1"), "retries=-1: must be 0 or more"),
        ((*PROSE, "--rate", "1", "--warm-up", "0"), "warm-up=0: must be at least 1"),
        ((*PROSE, "--clients", "0"), "clients=0: must be at least 1"),
        ((*PROSE, "--clients", "2", "--tries", "3"), "tries=3: used with --capacity only, which is not given"),
        ((*PROSE, "--rate", "1", "--speed", "4"), "speed=4.0: used with --recorded-times only, which is not given"),
        ((*PROSE, "--rate", "1", "--questions-per-document", "3"), "questions-per-document=3: used with --documents"),
        (
            ("--trace", __file__, "--rate", "1", "--output-tokens", "64"),
            "output-tokens=64: used with --documents, --prose or --tasks only, which are not given",
        ),
        (
            ("--trace", __file__, "--rate", "1", "--stop-at-eos"),
            "stop-at-eos=True: used with --documents, --prose or --tasks only, which are not given",
        ),
        (("--tasks", "niah", "--rate", "1"), "tasks=niah: 'niah' is no task; they are all, niah_single_1, "),
        (("--tasks", "vt:0", "--rate", "1"), "tasks=vt:0: weights must be above 0, finite"),
        (("--tasks", "vt", "--task-tokens", "4k", "--rate", "1"), "task-tokens=4k: must be LENGTH[:WEIGHT]"),
        (
            (*PROSE, "--rate", "1", "--task-tokens", "512"),
            "task-tokens=512: used with --tasks only, which is not given",
        ),
        ((*PROSE, "--rate", "1", "--speed", "0"), "speed=0.0: must be above 0"),
        (("--prose", "0", "--rate", "1"), "prose=0: lengths and weights"),
        (("--trace", "missing.jsonl", "--rate", "1"), "trace=missing.jsonl: must be a readable file"),
        (("--documents", "missing.txt", "--rate", "1"), "documents=missing.txt: must be a readable file"),
        (
            ("--documents", __file__, "--rate", "1", "--questions", "missing.txt"),
            "questions=missing.txt: must be a readable file",
        ),
    ],
)
def test_a_bad_option_is_refused_before_any_server_is_asked(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench("--url", URL, *options, "--out", str(tmp_path / "r")) == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["out", "save-trace"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing" / "r", tmp_path, tmp_path / "pipe"):
        assert bench("--url", URL, *PROSE, "--rate", "1", f"--{option}", str(path)) == 1
        assert f"{option}={path}: must be a file in a folder that exists" in capsys.readouterr().err


def test_prompts_that_a_cache_may_hold_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": [5, 6], "max_tokens": 2}\n')
    options = ("--trace", str(trace), "--clients", "1", "--warm-up", "1", "--out", str(tmp_path / "r"))
    with serving() as server:
        assert bench("--url", server.url, *options) == 0
        assert "prefix cache may hold them from the warm-up" in capsys.readouterr().err
        trace.write_text('{"prompt": "a b", "max_tokens": 2}\n')
        assert bench("--url", server.url, *options) == 0
        assert "prefix cache may hold" not in capsys.readouterr().err


def test_a_malformed_line_of_a_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t").write_text('{"prompt": "a", "max_tokens": 1}\nnot json\n')
    assert bench("--url", URL, "--trace", str(tmp_path / "t"), "--rate", "1") == 1
    assert "line 2: must be JSON" in capsys.readouterr().err


def test_a_server_that_is_not_there_or_refuses_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ("--out", str(tmp_path / "r"))
    url = f"http://127.0.0.1:{free_port()}"
    assert bench("--url", url, *PROSE, "--rate", "1", *out) == 1
    assert f"url={url}: cannot be reached" in capsys.readouterr().err
    with serving(lambda _server, _body: Reply([b"no key"], status=401)) as server:
        assert bench("--url", server.url, *PROSE, "--rate", "1", *out) == 1
    assert "HTTP 401: no key" in capsys.readouterr().err
    with serving(lambda _server, _body: Reply([b"no such model"], status=404)) as server:
        assert bench("--url", server.url, *PROSE, "--rate", "1", "--model", "other", *out) == 1
    said = capsys.readouterr().err
    assert "lists tiny; model other is asked for all the same" in said
    assert "HTTP 404: no such model" in said


def test_more_requests_than_the_trace_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t").write_text('{"prompt": "a", "max_tokens": 1}\n')
    with serving() as server:
        assert bench("--url", server.url, "--trace", str(tmp_path / "t"), "--requests", "2", "--rate", "1") == 1
    assert "requests=2: the trace has 1" in capsys.readouterr().err
