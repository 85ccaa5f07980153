"""Our settings out of vLLM's `--additional-config`."""

from typing import Any

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError

SECTION = "hybrid_sparse"


def settings_of(vllm_config: Any) -> HybridSparseConfig:
    """The validated settings; defaults where the user gave none. Raises ConfigError."""
    additional = vllm_config.additional_config or {}
    if not isinstance(additional, dict):
        raise ConfigError(f"additional_config={type(additional).__name__}: must be a mapping with the key {SECTION!r}")
    given = additional.get(SECTION, {})
    return HybridSparseConfig.from_mapping(given if given is not None else {})
