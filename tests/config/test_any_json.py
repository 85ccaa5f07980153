"""Any JSON in place of settings is either taken or refused with the setting's name. Nothing else happens."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue.settings import SECTION, settings_of

NAMES = [entry.name for entry in fields(HybridSparseConfig)]
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
LIKELY = st.sampled_from(
    [
        "dense",
        "topk",
        "progressive",
        "hgca",
        "fluxion",
        "auto",
        "estimated",
        "emulated",
        "per_layer",
        "lru",
        "queue",
        "own",
        "minmax",
        "key_codes",
        "",
        " 1",
        "0.5",
        "1e999",
        "nan",
        "inf",
    ]
)
NUMBERS = st.sampled_from([0, 1, 2, 16, 64, 0.05, 0.95, 1.0, -1, 2**63, 10**400, float("nan"), float("inf")])
SETTINGS = st.dictionaries(st.sampled_from(NAMES), LIKELY | NUMBERS | ANY_JSON, max_size=6)


def refusal_of(settings: Any, read: Callable[[Any], object] = HybridSparseConfig.from_mapping) -> str:
    """Why the settings are refused; empty if they are taken. Any error but a ConfigError passes through."""
    try:
        read(settings)
    except ConfigError as error:
        return str(error)
    return ""


def assert_taken_or_refused(settings: Any) -> None:
    if refusal := refusal_of(settings):
        assert refusal.startswith("hybrid_sparse")
        assert ": " in refusal
        return
    config = HybridSparseConfig.from_mapping(settings)
    used = {name: value for name, value in asdict(config).items() if value is not None}
    assert HybridSparseConfig.from_mapping(used) == config  # the settings in effect can be given again
    json.dumps(used, allow_nan=False)
    assert config.selection is not None
    assert config.retained is not None


@given(SETTINGS)
def test_any_values_of_known_settings(settings: dict[str, Any]) -> None:
    assert_taken_or_refused(settings)


@given(ANY_JSON)
def test_anything_in_place_of_settings(settings: Any) -> None:
    assert_taken_or_refused(settings)


@given(st.text(max_size=20), ANY_JSON)
def test_any_name(name: str, value: Any) -> None:
    assert_taken_or_refused({name: value})


@given(ANY_JSON | st.fixed_dictionaries({SECTION: ANY_JSON | SETTINGS}, optional={"another plugin": ANY_JSON}))
def test_anything_in_place_of_the_whole_additional_config(additional_config: Any) -> None:
    def read(given_config: Any) -> HybridSparseConfig:
        return settings_of(SimpleNamespace(additional_config=given_config))

    if refusal := refusal_of(additional_config, read):
        assert refusal.startswith(("hybrid_sparse", "additional_config"))
        return
    settings = additional_config.get(SECTION) if additional_config else None
    assert read(additional_config) == HybridSparseConfig.from_mapping({} if settings is None else settings)
