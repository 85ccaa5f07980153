"""The shape of a model that decides the size of its KV cache."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class KVShape:
    """The numbers of a model that its KV cache depends on."""

    layers: int
    kv_heads: int
    head_dim: int

    def token_bytes(self, element_bytes: int) -> int:
        """Bytes of a token's K and V in all layers, without summaries."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


def read_shape(model: Path) -> KVShape:
    """The shape of the model in a folder."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    q_heads = config["num_attention_heads"]
    return KVShape(
        layers=config["num_hidden_layers"],
        kv_heads=config.get("num_key_value_heads") or q_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // q_heads,
    )
