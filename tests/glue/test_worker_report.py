"""What the worker says at the end of a step: the difference to the step before, and a line now and then."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ECConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.glue.bare_worker import bare_worker
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.glue import worker as worker_module
from vllm_hybrid_sparse.glue.worker import _bytes_of
from vllm_hybrid_sparse.glue.worker_report import WorkerReport, reported_layer_pages, take_report
from vllm_hybrid_sparse.kernels.fallbacks import count_fallback, take_fallbacks
from vllm_hybrid_sparse.metrics import DecodeStats, Interval, TierStats
from vllm_hybrid_sparse.runtime.host import HostRuntime

STEP = DecodeStats(rows=2, selections=4, pages_total=40, pages_read=10, total_bytes=4000, read_bytes=1000)


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Steps:
    """A worker without a model: each step decodes what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.lines: list[str] = []
        monkeypatch.setattr(worker_module, "time", self.clock)
        monkeypatch.setattr(worker_module.logger, "info", lambda text, *values: self.lines.append(text % values))
        monkeypatch.setattr(CPUWorker, "sample_tokens", lambda *_: self.output)
        monkeypatch.setattr(CPUWorker, "shutdown", lambda *_: None)
        self.worker = bare_worker(_runtime=HostRuntime(HybridSparseConfig(num_threads=1, thread_pool="own")))
        monkeypatch.setattr(self.worker._runtime, "take_stats", lambda: self.stats)
        self.worker._logs, self.worker._interval = True, Interval(60.0)
        self.worker._reports, self.worker._ready, self.worker._host_kv_bytes = True, True, 4096

    def step(self, stats: DecodeStats, output: Any = None) -> WorkerReport | None:
        """Run one step; return the report on its output."""
        self.stats = stats
        self.output = ModelRunnerOutput(req_ids=[], req_id_to_index={}) if output is None else output
        given = self.worker.sample_tokens(None)
        carrier = getattr(given, "ec_connector_output", None)
        return take_report(SchedulerStats(ec_connector_stats=carrier.ec_connector_stats.data)) if carrier else None


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def test_what_packed_copies_hold_is_reported(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostRuntime, "packed_bytes", 12345)
    report = steps.step(STEP)
    assert report is not None
    assert (report.packed_bytes, report.host_kv_bytes) == (12345, 4096)


def test_each_step_reports_what_it_read(steps: Steps) -> None:
    later = replace(STEP, read_bytes=700)
    reports = [steps.step(STEP), steps.step(later)]
    assert [report and report.decode for report in reports] == [STEP, later]
    assert reports[0] is not None
    assert (reports[0].host_kv_bytes, reports[0].threads, reports[0].thread_pool) == (4096, 1, "own")


def test_each_step_reports_what_its_device_did(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [report and report.tiers for report in [steps.step(STEP)]] == [None]
    did = TierStats(groups=4, pages_wanted=10, pages_hit=9)
    monkeypatch.setattr(steps.worker._runtime, "take_tier_stats", lambda: did)
    reports = [steps.step(STEP), steps.step(STEP)]
    assert [report and report.tiers for report in reports] == [did, did]
    steps.worker.shutdown()
    assert len(steps.lines) == 2
    assert "device pool hit 90.0 % of 20 pages" in steps.lines[1]


def test_a_step_without_decoding_reports_nothing(steps: Steps) -> None:
    assert steps.step(DecodeStats(), EMPTY_MODEL_RUNNER_OUTPUT) is None
    assert EMPTY_MODEL_RUNNER_OUTPUT.ec_connector_output is None


def test_what_is_known_later_goes_with_the_next_report(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's numbers may come in a step that computes prompts alone."""
    late = DecodeStats(pages_read=7, read_bytes=70)
    did = TierStats(pages_wanted=7)
    monkeypatch.setattr(steps.worker._runtime, "take_tier_stats", lambda: did)
    assert steps.step(late) is None
    assert steps.step(late) is None
    report = steps.step(STEP)
    assert report is not None
    assert report.decode == STEP + late + late
    assert report.tiers == did + did + did
    assert [report and report.decode for report in [steps.step(STEP)]] == [STEP]


def test_prompts_alone_report_a_pool_that_the_scheduler_does_not_know(steps: Steps) -> None:
    """With nothing counted: what a device said late goes with the next report that counts."""
    late = DecodeStats(pages_read=7, read_bytes=70)
    steps.worker._layer_pages = 123
    first = steps.step(late, EMPTY_MODEL_RUNNER_OUTPUT)
    assert first is not None
    assert (first.layer_pages, first.decode, first.tiers) == (123, DecodeStats(), None)
    report = steps.step(STEP)
    assert report is not None
    assert (report.layer_pages, report.decode) == (123, STEP + late)
    steps.worker._layer_pages = None
    assert [report and report.layer_pages for report in [steps.step(STEP)]] == [None]
    assert EMPTY_MODEL_RUNNER_OUTPUT.ec_connector_output is None


def test_the_scheduler_reads_the_pool_s_size_and_leaves_the_report(steps: Steps) -> None:
    steps.worker._layer_pages = 5
    steps.stats, steps.output = STEP, ModelRunnerOutput(req_ids=[], req_id_to_index={})
    output = steps.worker.sample_tokens(None)
    assert [reported_layer_pages(output), reported_layer_pages(output)] == [5, 5]
    assert reported_layer_pages(EMPTY_MODEL_RUNNER_OUTPUT) is None
    foreign = ECConnectorOutput(ec_connector_stats=ECConnectorStats(data={"loads": 3}))
    assert reported_layer_pages(ModelRunnerOutput(req_ids=[], req_id_to_index={}, ec_connector_output=foreign)) is None


def test_fallbacks_go_with_the_next_report(steps: Steps) -> None:
    take_fallbacks()
    count_fallback("warm_up")
    assert steps.step(DecodeStats()) is None
    count_fallback("warm_up")
    reports = [steps.step(STEP), steps.step(STEP)]
    assert [report and report.fallbacks for report in reports] == [{"warm_up": 2}, {}]


def test_what_is_no_final_output_is_passed_on(steps: Steps) -> None:
    intermediate = SimpleNamespace()
    steps.stats, steps.output = STEP, intermediate
    assert steps.worker.sample_tokens(None) is intermediate


def test_nothing_is_reported_beside_an_encoder_cache_connector(steps: Steps) -> None:
    steps.worker._reports = False
    assert steps.step(STEP) is None


def test_a_line_a_minute_and_what_is_left_at_the_end(steps: Steps) -> None:
    for second in range(0, 151, 10):
        steps.clock.now_s = 1000.0 + second
        steps.step(STEP)
    assert [line.partition(", reading 25.0% ")[0] for line in steps.lines] == [
        "hybrid_sparse: decoded 12 tokens (0.2 a second)",
        "hybrid_sparse: decoded 12 tokens (0.2 a second)",
    ]
    steps.worker.shutdown()
    assert len(steps.lines) == 3
    steps.worker.shutdown()
    assert len(steps.lines) == 3


def test_idle_time_is_no_part_of_a_line(steps: Steps) -> None:
    for second in (0, 10, 20, 600):
        steps.clock.now_s = 1000.0 + second
        steps.step(STEP)
    (line,) = steps.lines
    assert line.startswith("hybrid_sparse: decoded 6 tokens (0.2 a second)")


def test_no_lines_where_the_interval_is_zero(steps: Steps) -> None:
    steps.worker._logs, steps.worker._interval = False, Interval(0.0)
    steps.step(STEP)
    steps.worker.shutdown()
    assert steps.lines == []


def test_a_worker_that_never_had_a_cache_ends_without_a_word(steps: Steps) -> None:
    bare_worker().shutdown()
    assert steps.lines == []


def test_memory_that_tensors_share_is_counted_once() -> None:
    store = torch.zeros(100)
    assert _bytes_of([store[:50], store[50:], torch.zeros(8, dtype=torch.uint8)]) == 408
    assert _bytes_of([]) == 0
