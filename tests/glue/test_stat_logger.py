"""How a worker's figures reach an API server's metrics, through vLLM's own classes."""

import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY, generate_latest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import LoggingStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_hybrid_sparse.glue import stat_logger_hook
from vllm_hybrid_sparse.glue.metric_families import (
    COUNTERS,
    DEVICE_COUNTERS,
    FALLBACKS_TOTAL,
    PREFIX,
    Family,
    exposed_names,
)
from vllm_hybrid_sparse.glue.registration import member
from vllm_hybrid_sparse.glue.stat_logger import HybridSparseStatLogger, _unregister_ours
from vllm_hybrid_sparse.glue.worker_report import WorkerReport, take_report
from vllm_hybrid_sparse.kernels.fallbacks import FALLBACKS
from vllm_hybrid_sparse.load.prometheus import total
from vllm_hybrid_sparse.metrics import DecodeStats, TierStats

DECODE = DecodeStats(
    rows=1,
    selections=2,
    pages_total=3,
    pages_read=4,
    pages_shared=6,
    pages_wasted=5,
    total_bytes=2**40,
    read_bytes=7,
    summary_bytes=8,
    early_stops=9,
    judged=10,
    kept_mass=9.5,
    microbatches=11,
    streaming=12,
    anchor_bytes=13,
)
TIERS = TierStats(
    groups=2,
    pages_wanted=100,
    pages_hit=60,
    pages_fetched=40,
    pages_evicted=30,
    pages_wasted=5,
    resident_groups=7,
    ranked_groups=8,
    blocks_entered=6,
    pages_on_host=9,
    groups_on_host=1,
    microbatches=11,
    failed_loads=3,
    device_busy_s=0.25,
    host_busy_s=0.125,
    step_s=0.5,
)
REPORT = WorkerReport(
    decode=DECODE, host_kv_bytes=2**33, packed_bytes=4096, isa="avx512", threads=2, thread_pool="openmp"
)


def config(**settings: object) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="tiny"),
        attention_config=SimpleNamespace(backend=member()),
        additional_config={"hybrid_sparse": settings},
    )


def received(report: WorkerReport) -> SchedulerStats:
    """The statistics of a step as an API server decodes them, made as vLLM's Scheduler.make_stats makes them."""
    carried = report.attach(EMPTY_MODEL_RUNNER_OUTPUT).ec_connector_output
    assert carried is not None
    assert carried.ec_connector_stats is not None
    stats = SchedulerStats(ec_connector_stats=carried.ec_connector_stats.data)
    outputs = MsgpackDecoder(EngineCoreOutputs).decode(
        MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    )
    assert outputs.scheduler_stats is not None
    return outputs.scheduler_stats


def exposed() -> str:
    return generate_latest(REGISTRY).decode()


@pytest.fixture(autouse=True)
def _clean_registry() -> Iterator[None]:
    yield
    _unregister_ours()


def test_a_report_arrives_as_it_was_sent_and_is_taken_off() -> None:
    stats = received(REPORT)
    assert take_report(stats) == REPORT
    assert stats.ec_connector_stats is None
    assert take_report(stats) is None


def test_what_carries_no_report_is_left_as_it_is() -> None:
    assert take_report(None) is None
    foreign = SchedulerStats(ec_connector_stats={"loads": 3})
    assert take_report(foreign) is None
    assert foreign.ec_connector_stats == {"loads": 3}


def test_the_shared_empty_output_of_vllm_is_not_written_to() -> None:
    output = REPORT.attach(EMPTY_MODEL_RUNNER_OUTPUT)
    assert EMPTY_MODEL_RUNNER_OUTPUT.ec_connector_output is None
    own = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    assert REPORT.attach(own) is own
    assert output is not EMPTY_MODEL_RUNNER_OUTPUT


FIELDS = {
    "decode_rows": "rows", "selections": "selections", "context_pages": "pages_total", "read_pages": "pages_read",
    "shared_pages": "pages_shared", "wasted_pages": "pages_wasted", "context_bytes": "total_bytes",
    "read_bytes": "read_bytes", "summary_read_bytes": "summary_bytes", "early_stops": "early_stops",
    "judged_selections": "judged", "kept_mass": "kept_mass", "microbatches": "microbatches",
    "streaming_selections": "streaming", "anchor_read_bytes": "anchor_bytes",
}  # fmt: skip
DEVICE_FIELDS = {
    "device_wanted_pages": "pages_wanted", "device_hit_pages": "pages_hit", "device_fetched_pages": "pages_fetched",
    "device_evicted_pages": "pages_evicted", "device_failed_loads": "failed_loads",
    "device_resident_selections": "resident_groups", "device_ranked_selections": "ranked_groups",
    "device_entered_blocks": "blocks_entered",
    "device_busy_seconds": "device_busy_s", "host_busy_seconds": "host_busy_s", "device_step_seconds": "step_s",
    "host_selections": "groups_on_host", "host_pages": "pages_on_host",
}  # fmt: skip


@pytest.mark.parametrize(("families", "wanted"), [(COUNTERS, FIELDS), (DEVICE_COUNTERS, DEVICE_FIELDS)])
def test_a_counter_is_of_the_sum_that_its_name_says(families: tuple[Family, ...], wanted: dict[str, str]) -> None:
    assert {family.name: family.field for family in families} == {
        f"vllm_hybrid_sparse_{name}_total": field for name, field in wanted.items()
    }


def test_every_sum_has_a_counter_that_grows_by_the_steps_difference() -> None:
    logger = HybridSparseStatLogger(config(), [0])
    for family in COUNTERS:
        assert total(exposed(), family.name) == 0.0, family.name
    for _ in range(3):
        logger.record(received(REPORT), None, engine_idx=0)
    text = exposed()
    for family in COUNTERS:
        assert total(text, family.name) == 3 * getattr(DECODE, family.field), family.name
    assert total(text, f"{PREFIX}host_kv_bytes") == 2**33  # a gauge: the latest, not the sum
    assert total(text, f"{PREFIX}packed_bytes") == 4096


def test_a_device_s_sums_have_counters_and_without_a_device_there_are_none() -> None:
    with_device = replace(REPORT, tiers=TIERS)
    assert take_report(received(with_device)) == with_device
    HybridSparseStatLogger(config(), [0]).record(received(REPORT), None)
    for family in DEVICE_COUNTERS:
        assert total(exposed(), family.name) is None, family.name
    logger = HybridSparseStatLogger(config(device="emulated"), [0])
    for family in DEVICE_COUNTERS:
        assert total(exposed(), family.name) == 0.0, family.name
    for _ in range(2):
        logger.record(received(with_device), None)
    for family in DEVICE_COUNTERS:
        assert total(exposed(), family.name) == 2 * getattr(TIERS, family.field) > 0, family.name


def test_fallbacks_of_a_device_are_counted_by_kind() -> None:
    logger = HybridSparseStatLogger(config(device="emulated"), [0])
    for kind in FALLBACKS:
        assert f'{FALLBACKS_TOTAL}{{engine="0",kind="{kind}",model_name="tiny"}} 0.0' in exposed()
    for times in (2, 3):
        report = replace(REPORT, decode=DecodeStats(), fallbacks={"warm_up": 1, "device_graphs": times})
        assert take_report(received(report)) == report
        logger.record(received(report), None)
    assert f'{FALLBACKS_TOTAL}{{engine="0",kind="warm_up",model_name="tiny"}} 2.0' in exposed()
    assert f'{FALLBACKS_TOTAL}{{engine="0",kind="device_graphs",model_name="tiny"}} 5.0' in exposed()
    assert total(exposed(), FALLBACKS_TOTAL) == 7.0
    HybridSparseStatLogger(config(), [0]).record(received(report), None)
    assert total(exposed(), FALLBACKS_TOTAL) is None


def test_every_kind_of_fallback_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "METRICS.md").read_text(encoding="utf-8")
    section = text.partition("\n## Fallbacks\n")[2]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == FALLBACKS


def test_engines_are_told_apart_and_one_that_is_not_ours_is_not_counted() -> None:
    logger = HybridSparseStatLogger(config(), [0, 1])
    logger.record(received(REPORT), None, engine_idx=1)
    stats = received(REPORT)
    logger.record(stats, None, engine_idx=7)
    assert stats.ec_connector_stats is None  # loggers after ours must not see it
    text = exposed()
    assert f'{PREFIX}decode_rows_total{{engine="1",model_name="tiny"}} 1.0' in text
    assert f'{PREFIX}decode_rows_total{{engine="0",model_name="tiny"}} 0.0' in text


def test_gauges_wait_for_the_first_report_and_settings_do_not() -> None:
    logger = HybridSparseStatLogger(config(policy="topk", topk_pages=8), [0])
    assert total(exposed(), f"{PREFIX}host_kv_bytes") is None
    (info,) = [line for line in exposed().splitlines() if line.startswith(f"{PREFIX}settings_info{{")]
    for label in ('policy="topk"', 'topk_pages="8"', 'threshold=""', 'summary="key_codes"', 'model_name="tiny"'):
        assert label in info
    logger.record(received(REPORT), None)
    assert 'isa="avx512",model_name="tiny",thread_pool="openmp",threads="2"} 1.0' in exposed()


def test_gauges_wait_for_a_report_with_a_decoded_token() -> None:
    """A report of prompts alone only says how large a pool is."""
    logger = HybridSparseStatLogger(config(), [0])
    logger.record(received(replace(REPORT, decode=DecodeStats(), layer_pages=7)), None)
    assert total(exposed(), f"{PREFIX}host_kv_bytes") is None
    logger.record(received(REPORT), None)
    assert total(exposed(), f"{PREFIX}host_kv_bytes") == 2**33


def test_a_second_engine_of_a_process_begins_anew() -> None:
    HybridSparseStatLogger(config(), [0]).record(received(REPORT), None)
    HybridSparseStatLogger(config(), [0])
    assert total(exposed(), f"{PREFIX}decode_rows_total") == 0.0


def test_exposed_names_are_those_of_the_registry() -> None:
    logger = HybridSparseStatLogger(config(device="emulated"), [0])
    logger.record(received(replace(REPORT, tiers=TIERS)), None)
    names = {line.partition("{")[0] for line in exposed().splitlines() if line.startswith(PREFIX)}
    assert {name for name in names if not name.endswith("_created")} == exposed_names()


@pytest.fixture
def made_with(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The custom loggers that vLLM's manager of loggers is made with, behind our hook."""
    given: list[Any] = []

    def make(_self: Any, _config: Any, _engines: Any = None, custom_stat_loggers: Any = None, **_: Any) -> None:
        given.append(custom_stat_loggers)

    monkeypatch.setattr(StatLoggerManager, "__init__", make)
    monkeypatch.setattr(StatLoggerManager, stat_logger_hook._HOOKED, False, raising=False)
    pickle.loads(pickle.dumps(member()))  # a front end may be sent its configuration
    stat_logger_hook.hook_stat_loggers()  # plugins may be loaded twice
    return given


def test_our_logger_comes_before_all_others_where_the_backend_is_selected(made_with: list[Any]) -> None:
    StatLoggerManager(config(), engine_idxs=[0], custom_stat_loggers=[LoggingStatLogger])
    StatLoggerManager(config())
    assert made_with == [[HybridSparseStatLogger, LoggingStatLogger], [HybridSparseStatLogger]]


def test_where_the_backend_is_not_selected_loggers_are_vllms_own(made_with: list[Any]) -> None:
    other = config()
    other.attention_config.backend = None
    StatLoggerManager(other)
    StatLoggerManager(other, custom_stat_loggers=[LoggingStatLogger])
    assert made_with == [None, [LoggingStatLogger]]
