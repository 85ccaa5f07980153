"""Adds the workers' figures to the Prometheus metrics of an API server, next to vLLM's own."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.glue.metric_families import (
    COUNTERS,
    DEVICE_COUNTERS,
    FALLBACK_LABELS,
    FALLBACKS_TOTAL,
    GAUGES,
    HOST_INFO,
    HOST_INFO_LABELS,
    LABELS,
    PREFIX,
    SETTINGS_INFO,
    Family,
)
from vllm_hybrid_sparse.glue.settings import settings_of
from vllm_hybrid_sparse.glue.worker_report import take_report
from vllm_hybrid_sparse.kernels.fallbacks import FALLBACKS
from vllm_hybrid_sparse.metrics import DecodeStats, TierStats


class HybridSparseStatLogger(AggregateStatLoggerBase):
    """Exposes our metrics; one in each process, for all the engines that the process talks to.

    Counters begin at 0, gauges with an engine's first report. If several API servers share the engines, vLLM makes
    Prometheus's client keep values in files, and whichever server is asked combines them: it adds up counters, and
    shows the latest value of a gauge that any server was told.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        _unregister_ours()
        model_name = vllm_config.model_config.served_model_name
        self._labels = {index: (model_name, str(index)) for index in engine_indexes}
        settings = settings_of(vllm_config)
        self._counters = self._make_counters(COUNTERS)
        has_device = settings.device != "none"
        self._device_counters = self._make_counters(DEVICE_COUNTERS if has_device else ())
        self._fallbacks = self._make_fallbacks() if has_device else {}
        self._gauges = {family.field: _gauge(family.name, family.help, LABELS) for family in GAUGES}
        self._host_info = _gauge(HOST_INFO, "What the settings became on the machine.", (*LABELS, *HOST_INFO_LABELS))
        self._show_settings(settings)

    def _make_counters(self, families: Sequence[Family]) -> dict[str, dict[int, Counter]]:
        """Counters by field and engine, all of them at 0."""
        made = {family.field: Counter(family.name, family.help, labelnames=LABELS) for family in families}
        return {
            field: {index: counter.labels(*labels) for index, labels in self._labels.items()}
            for field, counter in made.items()
        }

    def _make_fallbacks(self) -> dict[int, dict[str, Counter]]:
        """Counters by engine and kind, all of them at 0."""
        counter = Counter(
            FALLBACKS_TOTAL, "Times that something stood in for what was to be used.", (*LABELS, *FALLBACK_LABELS)
        )
        return {
            index: {kind: counter.labels(*labels, kind) for kind in FALLBACKS} for index, labels in self._labels.items()
        }

    def _show_settings(self, settings: HybridSparseConfig) -> None:
        values = {entry.name: getattr(settings, entry.name) for entry in fields(settings)}
        info = _gauge(SETTINGS_INFO, "Settings in effect; empty: not used by the policy.", (*LABELS, *values))
        shown = ["" if value is None else str(value) for value in values.values()]
        for labels in self._labels.values():
            info.labels(*labels, *shown).set(1)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,  # noqa: ARG002
        mm_cache_stats: Any = None,  # noqa: ARG002
        engine_idx: int = 0,
    ) -> None:
        """Count the report that the step's statistics carry, and remove it: later loggers do not know it."""
        report = take_report(scheduler_stats)
        if report is None or engine_idx not in self._labels:
            return
        _count(self._counters, report.decode, engine_idx)
        if report.tiers is not None:
            _count(self._device_counters, report.tiers, engine_idx)
        if self._fallbacks:
            for kind, times in report.fallbacks.items():
                self._fallbacks[engine_idx][kind].inc(times)
        if not report.decode.rows:  # the report of prompts alone, which gauges do not show
            return
        labels = self._labels[engine_idx]
        for field, gauge in self._gauges.items():
            gauge.labels(*labels).set(getattr(report, field))
        self._host_info.labels(*labels, report.isa, str(report.threads), report.thread_pool).set(1)

    def log_engine_initialized(self) -> None:
        """Nothing: the settings were shown when the logger was made."""


def _count(counters: dict[str, dict[int, Counter]], sums: DecodeStats | TierStats, engine_idx: int) -> None:
    for field, of_engine in counters.items():
        if amount := getattr(sums, field):
            of_engine[engine_idx].inc(amount)


def _gauge(name: str, text: str, labels: tuple[str, ...]) -> Gauge:
    return Gauge(name, text, labelnames=labels, multiprocess_mode="mostrecent")


def _unregister_ours() -> None:
    """Unregister the metrics of an earlier engine in this process, as vLLM does with its own."""
    for collector, names in list(REGISTRY._collector_to_names.items()):
        if any(name.startswith(PREFIX) for name in names):
            REGISTRY.unregister(collector)
