"""Our settings from vLLM's `--additional-config`, with the device that vLLM's platform decides."""

import difflib
import logging
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.setting import SECTION, refusal

logger = logging.getLogger(__name__)


def settings_of(vllm_config: Any) -> HybridSparseConfig:
    """The validated settings, with defaults for those that the user did not give. Raises ConfigError.

    The device is cuda on vLLM's CUDA platform, since the model's tensors lie there, and on no other.
    """
    additional = vllm_config.additional_config or {}
    if not isinstance(additional, dict):
        raise ConfigError(f"additional_config={type(additional).__name__}: must be a mapping with the key {SECTION!r}")
    _check_section(additional)
    given = additional.get(SECTION, {})
    from vllm.platforms import current_platform  # noqa: PLC0415  (resolves the platform: not before plugins load)

    return settings_on(given if given is not None else {}, on_cuda=current_platform.is_cuda())


def settings_on(given: Any, *, on_cuda: bool) -> HybridSparseConfig:
    """The settings on one platform. Raises ConfigError."""
    if on_cuda and isinstance(given, Mapping) and given.get("device") is None:
        given = {**given, "device": "cuda"}
    settings = HybridSparseConfig.from_mapping(given)
    if on_cuda and settings.device != "cuda":
        rule = "must be cuda on vLLM's CUDA platform, where the model's tensors lie"
        raise refusal("device", settings.device, rule)
    if not on_cuda and settings.device == "cuda":
        raise refusal("device", settings.device, "needs vLLM's CUDA build and a GPU, and the platform is another")
    return settings


def _check_section(additional: Mapping[str, Any]) -> None:
    """Refuse a key that looks like our section but is not, since its settings would have no effect.

    Other keys belong to other plugins. A key named like one of our settings is refused if our section is missing;
    beside our section it is warned of.
    """
    for name, value in additional.items():
        plain = str(name).replace("-", "_").replace(" ", "_").lower()
        if name != SECTION and difflib.get_close_matches(plain, [SECTION], n=1, cutoff=0.85):
            raise ConfigError(f"additional_config.{name}={value!r}: no such section; did you mean {SECTION}?")
    names = [entry.name for entry in fields(HybridSparseConfig) if entry.name in additional]
    if names and SECTION not in additional:
        raise ConfigError(f"additional_config.{names[0]}={additional[names[0]]!r}: must be in the section {SECTION}")
    for name in names:
        _warn_of(name, repr(additional[name]))


@cache
def _warn_of(name: str, value: str) -> None:
    """Warn once of a key that looks like one of our settings beside our section."""
    logger.warning("additional_config.%s=%s has no effect: settings are in the section %s", name, value, SECTION)
