"""The code exposes every metric that a panel or a rule asks for. A name that changes must change in both places."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.deploy.files import DEPLOY, RULES, load_dashboard, load_yaml
from vllm_hybrid_sparse.glue.metric_families import (
    COUNTERS,
    DEVICE_COUNTERS,
    FALLBACKS_TOTAL,
    GAUGES,
    LABELS,
    PREFIX,
    exposed_names,
)

_NAME = re.compile(r"\b(?:vllm:|vllm_hybrid_sparse_)[a-zA-Z_]+")
_RECORDED = re.compile(r"\bmodel:vllm_hybrid_sparse_\w+:\w+")


def expressions() -> Iterator[str]:
    for panel in load_dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for variable in load_dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    for group in load_yaml(RULES)["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def asked_for() -> set[str]:
    return {name for text in expressions() for name in _NAME.findall(_RECORDED.sub("", text))}


def vllm_names() -> set[str]:
    """Names that vLLM exposes, from the source of its loggers."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed")
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text(encoding="utf-8")
    names = set(re.findall(r'name="(vllm:[a-z_]+)"', source))
    suffixes = ("", "_total", "_bucket", "_sum", "_count")
    return {name + suffix for name in names for suffix in suffixes}


def test_our_names_exist() -> None:
    ours = {name for name in asked_for() if name.startswith(PREFIX)}
    assert ours
    assert ours - exposed_names() == set()


def test_vllms_names_exist() -> None:
    theirs = {name for name in asked_for() if name.startswith("vllm:")}
    assert theirs
    assert theirs - vllm_names() == set()


def test_every_name_of_ours_is_shown() -> None:
    shown = {name for panel in load_dashboard()["panels"] for name in _NAME.findall(str(panel.get("targets")))}
    assert exposed_names() - shown == set()


def test_rules_that_are_asked_for_are_recorded() -> None:
    recorded = {rule["record"] for group in load_yaml(RULES)["groups"] for rule in group["rules"] if "record" in rule}
    used = {name for text in expressions() for name in _RECORDED.findall(text)}
    assert used
    assert used - recorded == set()


def test_names_follow_prometheus() -> None:
    for family in (*COUNTERS, *DEVICE_COUNTERS):
        assert re.fullmatch(r"vllm_hybrid_sparse_[a-z_]+_total", family.name)
    for family in GAUGES:
        assert re.fullmatch(r"vllm_hybrid_sparse_[a-z_]+_bytes", family.name)
    assert re.fullmatch(r"vllm_hybrid_sparse_[a-z_]+_total", FALLBACKS_TOTAL)
    assert len(exposed_names()) == len(COUNTERS) + len(DEVICE_COUNTERS) + len(GAUGES) + 3
    assert LABELS == ("model_name", "engine")


def test_the_series_of_the_rules_tests_exist_too() -> None:
    text = (DEPLOY / "prometheus" / "rules_test.yml").read_text(encoding="utf-8")
    names = {name for name in _NAME.findall(_RECORDED.sub("", text)) if name.startswith(PREFIX)}
    assert names
    assert names - exposed_names() == set()
