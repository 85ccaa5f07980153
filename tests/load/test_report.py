"""The report: JSON from which the figures can be computed again, and a page that needs no other file."""

import asyncio
import copy
import itertools
import json
import math
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.load.model_server import ModelSide, simple_requests
from tests.load.virtual_time import run_virtually
from vllm_hybrid_sparse.load.arrivals import poisson
from vllm_hybrid_sparse.load.capacity import Search, psa_slos
from vllm_hybrid_sparse.load.figures import Limits
from vllm_hybrid_sparse.load.page import page
from vllm_hybrid_sparse.load.percentiles import percentile
from vllm_hybrid_sparse.load.prometheus import Histogram
from vllm_hybrid_sparse.load.queueing import Queueing, Unloaded, queueing
from vllm_hybrid_sparse.load.report import document, without_places, write_json
from vllm_hybrid_sparse.load.search import search_in_turns
from vllm_hybrid_sparse.load.summary import summary
from vllm_hybrid_sparse.load.svg import Chart, draw
from vllm_hybrid_sparse.load.turns import Load, Results, rounds

LOAD = Load(requests=tuple(simple_requests(8, max_tokens=6)), salt="s", prime=False)


def quiet(_line: str) -> None:
    """Say nothing."""


def server_queueing(observed: Histogram) -> Queueing:
    return queueing([], observed, Unloaded((), None))


def measured(capacity: bool = False, interrupted: bool = False, load: Load = LOAD, **more: Any) -> dict[str, Any]:
    all_results = [
        Results(ModelSide("stock <b>", prefill_s=1.0)),  # type: ignore[arg-type]
        Results(ModelSide("ours", prefill_s=0.5, refused_from=None if capacity else 7)),  # type: ignore[arg-type]
    ]
    stop, slos, searches = asyncio.Event(), (), []
    if capacity:
        slos = psa_slos(0.01)
        at = lambda rate, count: poisson(rate, count, 0)  # noqa: E731
        work = search_in_turns(all_results, load, at, slos, Search(first=1.0, tries=4), stop=stop, say=quiet)
        searches = run_virtually(work)
    else:
        at_round = lambda number: poisson(1.0, len(load.requests), number)  # noqa: E731
        run_virtually(rounds(all_results, load, at_round, 2, stop=stop, say=quiet))
    return document(
        load,
        all_results,
        limits=Limits(ttft=5000.0),
        slos=slos,
        searches=searches,
        settings={"rate": 1.0, "trace": ["/home/someone/traces/a.jsonl"], "out": "/tmp/out"},
        command=["hybrid-sparse", "bench", "--trace", "/home/someone/traces/a.jsonl", "--url", "http://127.0.0.1:1/v1"],
        interrupted=interrupted,
        **more,
    )


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    return measured()


@pytest.fixture(scope="module")
def searched() -> dict[str, Any]:
    return measured(capacity=True)


def test_json_holds_the_raw_times_from_which_the_figures_follow(compared: dict[str, Any], tmp_path: Any) -> None:
    write_json(tmp_path / "report.json", compared)
    report = json.loads((tmp_path / "report.json").read_text())
    for server in report["servers"]:
        requests = [one for run in server["runs"] for one in run["requests"]]
        assert len(requests) == server["figures"]["planned"] == 16
        ok = [one for one in requests if one["outcome"] == "ok"]
        ttft = [one["arrivals"][0][0] for one in ok]
        gaps = [b[0] - a[0] for one in ok for a, b in itertools.pairwise(one["arrivals"])]
        assert server["figures"]["ttft_s"]["p90"] == pytest.approx(percentile(ttft, 90), abs=1e-5)
        assert server["figures"]["tbt_s"]["p99"] == pytest.approx(percentile(gaps, 99), abs=1e-5)
    assert report["trace"]["requests"] == 8
    assert set(report["versions"]) == {"vllm-hybrid-sparse", "python", "aiohttp"}


def test_a_report_that_cannot_be_written_leaves_the_one_before(
    compared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, path = Path.write_text, tmp_path / "report.json"
    path.write_text("before")

    def half(file: Path, text: str, **how: Any) -> int:
        write(file, text[: len(text) // 2], **how)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, compared)
    assert path.read_text() == "before"


def test_failures_stand_in_json_page_and_summary(compared: dict[str, Any]) -> None:
    failed = [one for run in compared["servers"][1]["runs"] for one in run["requests"] if one["outcome"] != "ok"]
    assert [one["reason"] for one in failed] == ["HTTP 429: full"] * 2
    assert "ours: 2 requests were not answered" in page(compared)
    assert "refused: HTTP 429: full" in page(compared)
    assert "2 refused" in summary(compared)
    assert "2 × refused: HTTP 429: full" in summary(compared)


def test_servers_are_compared_with_the_first(compared: dict[str, Any]) -> None:
    (name,) = compared["ratios"]
    better = {ratio["figure"]: ratio["better"] for ratio in compared["ratios"][name]}
    assert name == "ours"
    assert better["ttft_s p50"] > 1
    assert f"ttft_s p50 {better['ttft_s p50']:.2f}" in summary(compared)


def test_ratios_of_servers_that_did_not_answer_all_say_of_how_many(compared: dict[str, Any]) -> None:
    said = "of the 16 and 14 requests that were answered"
    assert f"ours against stock <b> (above 1 is better; {said}): " in summary(compared)
    assert f'<p class="warn">ours: ratios are {said}.</p>' in page(compared)
    whole = copy.deepcopy(compared)
    whole["servers"][1]["figures"]["outcomes"] = {"ok": 16}
    assert "ours against stock <b> (above 1 is better): " in summary(whole)
    assert not any("requests that were answered" in shown for shown in (summary(whole), page(whole)))
    whole["servers"][0]["figures"]["outcomes"] = {"ok": 9, "failed": 7}
    assert all("of the 9 and 16 requests that were answered" in shown for shown in (summary(whole), page(whole)))


def test_shares_of_times_to_first_token_are_of_all_requests_that_were_planned(
    compared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Chart] = {}

    def note(chart: Chart) -> str:
        drawn[chart.title] = chart
        return draw(chart)

    monkeypatch.setattr("vllm_hybrid_sparse.load.page.draw", note)
    page(compared)
    chart = drawn["Time to first token, cumulative"]
    assert [series.points[-1][1] for series in chart.series] == [1.0, 14 / 16]
    assert chart.y_label == "share of planned requests"


def test_the_rate_that_arrivals_came_to_stands_by_what_was_answered(compared: dict[str, Any]) -> None:
    report = copy.deepcopy(compared)
    for run in report["servers"][0]["runs"]:
        assert run["offered_per_s"] == pytest.approx(1.0)
    report["servers"][0]["runs"][0]["offered_per_s"] = 0.5  # as of older reports: eight requests in 16 s, eight in 8 s
    answered = report["servers"][0]["figures"]["requests_per_s"]
    assert f"{answered:.3f} requests/s of 0.667 offered, goodput" in summary(report)
    assert f"{answered:.3g} requests/s of 0.667 offered, goodput" in page(report)
    for run in report["servers"][0]["runs"]:
        run["offered_per_s"] = None  # four clients
    assert summary(report).count(" offered") == page(report).count(" offered") == 1  # of the other server


def test_every_try_has_the_rate_that_its_arrivals_came_to(searched: dict[str, Any]) -> None:
    report = copy.deepcopy(searched)
    for server, raw in zip(searched["capacity"]["servers"], searched["servers"], strict=True):
        offered = [run["offered_per_s"] for run in raw["runs"]]
        assert offered == pytest.approx([one["rate"] for one in server["tries"]])
    report["servers"][0]["runs"][0]["offered_per_s"] = 0.8765  # of 1.0, as in older reports
    assert "<th>requests/s</th><th>offered/s</th>" in page(report)
    assert "<td>1</td><td>0.8765</td>" in page(report)


def test_sources_are_told_apart_where_there_are_several(compared: dict[str, Any]) -> None:
    assert compared["servers"][0]["figures"]["by_source"] == {}
    assert "by source" not in summary(compared)
    assert "<th>source</th>" not in page(compared)
    named = [replace(one, source=("vt", "<b>" + "x" * 40)[n % 2]) for n, one in enumerate(LOAD.requests)]
    report = json.loads(json.dumps(measured(load=replace(LOAD, requests=tuple(named)))))
    figures = report["servers"][1]["figures"]
    seen = figures["by_source"]
    assert {name: (one["planned"], one["answered"]) for name, one in seen.items()} == {
        "<b>" + "x" * 40: (8, 6),
        "vt": (8, 8),
    }
    own = [run["requests"] for run in report["servers"][1]["runs"]]
    ttft = [one["arrivals"][0][0] for requests in own for one in requests if one["source"] == "vt"]
    assert seen["vt"]["ttft_p99_s"] == pytest.approx(percentile(ttft, 99), abs=1e-5)
    cells = [f"{seen['vt'][part] * 1e3:.1f}" for part in ("ttft_p50_s", "ttft_p99_s", "tbt_p50_s", "tbt_p99_s")]
    (_, line) = [line.split() for line in summary(report).splitlines() if line.startswith("vt ")]
    assert line == ["vt", "8", "8", *cells]
    assert f"<b>{'x' * 24}…" in summary(report)
    assert "<th>source</th><th>requests</th><th>answered</th><th>P50 to first token, ms</th>" in page(report)
    assert f"<td>&lt;b&gt;{'x' * 40}</td><td>8</td><td>6</td>" in page(report)


@pytest.mark.parametrize("which", ["compared", "searched"])
def test_older_reports_can_be_shown(which: str, request: pytest.FixtureRequest) -> None:
    old = copy.deepcopy(request.getfixturevalue(which))
    for server in old["servers"]:
        if server["figures"]:
            del server["figures"]["by_source"]
        for run in server["runs"]:
            del run["figures"]["by_source"], run["offered_per_s"]
    for server in (old["capacity"] or {"servers": []})["servers"]:
        del server["ended"]
    assert " offered" not in summary(old)
    assert "ours" in page(old)


def test_texts_are_kept_only_where_asked_for(compared: dict[str, Any]) -> None:
    def keys(report: dict[str, Any]) -> set[str]:
        return set(report["servers"][0]["runs"][0]["requests"][0])

    assert "text" not in keys(compared)
    assert "text_sha256" in keys(compared)
    assert "text" in keys(measured(keep_text=True))


def test_capacity_lists_every_try_and_what_was_found(searched: dict[str, Any]) -> None:
    found = searched["capacity"]
    assert [limit["name"] for limit in found["limits"]] == ["strict", "relaxed"]
    for server, raw in zip(found["servers"], searched["servers"], strict=True):
        assert [one["run"] for one in server["tries"]] == [run["name"] for run in raw["runs"]]
        assert all(set(one["broken"]) == {"strict", "relaxed"} for one in server["tries"])
    assert found["servers"][0]["capacity"]["relaxed"]["of_reference"] in (None, 1.0)
    assert "relaxed" in summary(searched)
    for shown in (summary(searched), page(searched)):
        assert "too few requests to show that this rate is sustained" in shown  # there are eight requests
        assert "ours: queueing delay from estimate: time to first token less" in shown


def test_capacity_says_why_requests_failed_and_what_was_not_found(searched: dict[str, Any]) -> None:
    report = copy.deepcopy(searched)
    report["servers"][1]["runs"][0]["figures"]["reasons"] = {"refused: HTTP 500: no": 3, "failed: broke off": 1}
    found = report["capacity"]["servers"][1]["capacity"]
    found["strict"] = {"holds_per_s": None, "fails_per_s": 1.0, "of_reference": None, "too_short": False}
    found["relaxed"] = {"holds_per_s": 2.0, "fails_per_s": None, "of_reference": None, "too_short": False}
    text = page(report)
    assert "3 × refused: HTTP 500: no; 1 others" in text
    assert "at no tried rate" in text
    unfailed = "no tried rate failed: a higher one may hold, too"
    for server in report["capacity"]["servers"][:1]:
        server["capacity"] = dict.fromkeys(server["capacity"], found["strict"])
    for shown in (page(report), summary(report)):
        assert shown.count(unfailed) == 1  # of ours, relaxed


def test_delays_out_of_a_histogram_are_shown_as_the_bounds_that_are_known(compared: dict[str, Any]) -> None:
    report = copy.deepcopy(compared)
    queueing = asdict(server_queueing(Histogram((0.3, 0.5, 2.0, math.inf), (60.0, 95.0, 95.0, 100.0))))
    report["servers"][0]["figures"]["queueing"] = json.loads(json.dumps(queueing))
    assert "<td>≤0.3</td><td>0.3–0.5</td><td>&gt;2</td>" in page(report)
    (line,) = [line for line in summary(report).splitlines() if "≤" in line]
    assert line.split() == ["queueing", "delay,", "ms", "≤300", "300–500", ">2000"]
    del report["servers"][0]["figures"]["queueing"]["above_s"]  # as in older reports
    assert "<td>0.3</td><td>0.5</td><td>2</td>" in page(report)


def test_the_longest_bounds_of_vllm_s_histogram_do_not_run_into_each_other(compared: dict[str, Any]) -> None:
    report = copy.deepcopy(compared)
    delays = server_queueing(Histogram((60.0, 120.0, 240.0, 480.0, math.inf), (0.0, 60.0, 95.0, 100.0, 100.0)))
    report["servers"][0]["figures"]["queueing"] = json.loads(json.dumps(asdict(delays)))
    (line,) = [line for line in summary(report).splitlines() if "240000" in line]
    assert line.split()[3:] == ["60000–120000", "120000–240000", "240000–480000"]


def test_a_client_that_sends_late_is_told_of(compared: dict[str, Any]) -> None:
    report = copy.deepcopy(compared)
    assert not any("overloaded" in shown for shown in (page(report), summary(report)))
    report["servers"][0]["runs"][0]["figures"]["lag_s"]["p99"] = 0.3
    assert "the client is overloaded: P99 of sending late is 0.30 s" in page(report)
    assert "stock <b>: the client is overloaded: P99 of sending late is 0.30 s" in summary(report)


def test_no_place_of_a_machine_is_in_a_report(compared: dict[str, Any]) -> None:
    text = json.dumps(compared)
    assert "/home/someone" not in text
    assert "/tmp" not in text
    assert "a.jsonl" in text
    assert compared["command"] == "hybrid-sparse bench --trace a.jsonl --url http://127.0.0.1:1/v1"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/a/b/c.txt", "c.txt"),
        ("--out=/a/b/c", "--out=c"),
        ("~/a/b", "b"),
        ("a/b/../c", "a/b/../c"),
        ("ours=http://host:80/v1", "ours=http://host:80/v1"),
        ('{"path": "/a/b"}', '{"path": "b"}'),
        ("/a/b,/c/d", "b,d"),
        ("org/model", "org/model"),
    ],
)
def test_paths_are_cut_to_their_last_name(text: str, left: str) -> None:
    assert without_places(text) == left


class Outline(HTMLParser):
    """Checks that elements are closed in order, and collects references to anything outside."""

    VOID = ("meta", "line", "polyline")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.note(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.note(tag, attrs)

    def note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [name for name, _ in attrs if name in {"src", "href", "xlink:href", "action", "data"}]
        self.outside += [tag] if tag in {"script", "link", "img", "iframe", "object", "image", "use"} else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()


@pytest.mark.parametrize("which", ["compared", "searched"])
def test_the_page_is_well_formed_and_needs_nothing_but_itself(which: str, request: pytest.FixtureRequest) -> None:
    text = page(request.getfixturevalue(which))
    outline = Outline()
    outline.feed(text)
    outline.close()
    assert outline.open == []
    assert outline.outside == []
    assert not re.search(r"url\(|@import", text)
    assert outline.tags.count("svg") == (5 if which == "searched" else 4)
    assert "polyline" in outline.tags
    assert "circle" in outline.tags


def test_the_page_follows_the_reader_s_light_or_dark(compared: dict[str, Any]) -> None:
    text = page(compared)
    assert "@media (prefers-color-scheme: dark)" in text
    colours = re.findall(r"(?:fill|stroke)=\"([^\"]+)\"", text)
    assert colours == []  # every colour comes from the style sheet, which has two sets


def test_names_are_text_and_not_markup(compared: dict[str, Any]) -> None:
    text = page(compared)
    assert "stock &lt;b&gt;" in text
    assert "stock <b>" not in text


def test_an_interrupted_report_says_so() -> None:
    assert "Interrupted" in page(measured(interrupted=True))
