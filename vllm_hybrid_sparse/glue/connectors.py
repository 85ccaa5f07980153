"""Which of vLLM's own KV connectors cannot work without a GPU over our blocks, and why."""

from collections.abc import Iterator, Mapping
from typing import Any

_NEEDS_A_GPU = "it moves blocks through a GPU's memory or streams, and there is none"
_SPLITS_BLOCKS = "NIXL is not supported: in a block, a head's bytes are not one piece"

UNSERVED = {
    "ExampleHiddenStatesConnector": "it needs the speculative method extract_hidden_states, which is not supported",
    "FlexKVConnectorV1": _NEEDS_A_GPU,
    "HF3FSKVConnector": _NEEDS_A_GPU,
    "HiSparseConnector": _NEEDS_A_GPU,
    "LMCacheConnectorV1": _NEEDS_A_GPU,
    "MoRIIOConnector": _NEEDS_A_GPU,
    "MooncakeConnector": _NEEDS_A_GPU,
    "MooncakeStoreConnector": _NEEDS_A_GPU,
    "NixlConnector": _SPLITS_BLOCKS,
    "NixlPullConnector": _SPLITS_BLOCKS,
    "NixlPushConnector": _SPLITS_BLOCKS,
    "OffloadingConnector": _NEEDS_A_GPU,
    "SimpleCPUOffloadConnector": _NEEDS_A_GPU,
}
"""By name, as vLLM registers them: why each fails on vLLM's CPU platform, or reads wrong bytes.

NIXL runs there, but between servers of different sizes it splits blocks as vLLM's own backends lay them out.
"""


def unserved_connector(transfer: Any) -> tuple[str, str] | None:
    """The name of a connector that cannot work without a GPU, and why; None if there is none.

    transfer   vLLM's KVTransferConfig. Those within a MultiConnector count. A connector that is loaded from a module
               of the user's is not judged, nor is OffloadingConnector with a way to store that is the user's
    """
    own = {
        "kv_connector": transfer.kv_connector,
        "kv_connector_module_path": transfer.kv_connector_module_path,
        "kv_connector_extra_config": transfer.kv_connector_extra_config,
    }
    for connector in _each(own):
        name, extra = connector.get("kv_connector"), connector.get("kv_connector_extra_config") or {}
        users = connector.get("kv_connector_module_path") or extra.get("spec_module_path")
        if name in UNSERVED and not users:
            return str(name), UNSERVED[str(name)]
    return None


def _each(connector: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A connector and those that a MultiConnector makes of its extra configuration."""
    yield connector
    inner = (connector.get("kv_connector_extra_config") or {}).get("connectors") or ()
    for one in inner:
        if isinstance(one, Mapping):
            yield from _each(one)
