"""A KV connector that writes keys and values past our kernels leaves no summary of older keys behind."""

import random
from pathlib import Path

from tests.system.engine_jobs import run_jobs
from tests.system.tiny_models import make_tiny_model


def test_loaded_blocks_are_summarised(tmp_path: Path) -> None:
    prompt = [
        random.Random(7).randrange(256) for _ in range(1025)
    ]  # 8 whole blocks and a token: all but this token is loaded
    connector = {
        "kv_connector": "DecodeBenchConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 1.0},
    }
    job = {
        "name": "loaded",
        "engine_args": {
            "model": str(make_tiny_model("llama-gqa", tmp_path)),
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 2048,
            "kv_cache_memory_bytes": 8 << 20,
            "attention_backend": "hybrid_sparse",
            "kv_transfer_config": connector,
        },
        "prompts": [prompt],
        "max_tokens": 4,
        "blocks": True,
    }
    result = run_jobs([job], tmp_path / "engine.log", timeout_s=300)["loaded"]
    assert "error" not in result, result["error"]
    assert len(result["answers"][0]["token_ids"]) == 4
    assert result["blocks"] == {"full": 8, "stale": 0}
