"""Perplexity, kept attention weight and KV read by selection, against full attention, on the windows of a text.

    python -m benchmarks.accuracy.perplexity --text PATH [--model PATH] [--windows 8] [--selections full,codes2-5%]

The shipped kernels run inside Transformers (`vllm_hybrid_sparse.hf`), in float32. Each window is prefilled densely,
then its last tokens are decoded one by one, the true one fed whatever the model says. With `--out FILE` what it holds
already is kept and only the rest is run.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks.accuracy.kept_mass import KeptMass
from benchmarks.report import markdown_table, save
from vllm_hybrid_sparse.cli.smollm2 import model_dir
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.hf import SparseSession

PROMISE = 0.95
SELECTIONS: dict[str, dict[str, object]] = {
    "full": {"policy": "dense"},
    "quest-5%": {"policy": "topk", "topk_ratio": 0.05, "summary": "minmax"},
    "quest-2%": {"policy": "topk", "topk_ratio": 0.02, "summary": "minmax"},
    "cuboid-5%": {"policy": "topk", "topk_ratio": 0.05, "summary": "cuboid_mean"},
    "cuboid-2%": {"policy": "topk", "topk_ratio": 0.02, "summary": "cuboid_mean"},
    "codes1-5%": {"policy": "topk", "topk_ratio": 0.05, "code_bits": 1},
    "codes1-2%": {"policy": "topk", "topk_ratio": 0.02, "code_bits": 1},
    "codes2-5%": {"policy": "topk", "topk_ratio": 0.05, "code_bits": 2},
    "codes2-2%": {"policy": "topk", "topk_ratio": 0.02, "code_bits": 2},
    "codes2-0.95": {"policy": "progressive", "threshold": PROMISE},
    "codes1-0.95": {"policy": "progressive", "threshold": PROMISE, "code_bits": 1},
    "psa-0.95": {"policy": "progressive", "threshold": PROMISE, "summary": "cuboid_mean", "microbatch_pages": 8},
    "psa-codes2-0.95": {"policy": "progressive", "threshold": PROMISE, "remainder": "lightest_page"},
}


@torch.inference_mode()
def run_window(
    model: PreTrainedModel, settings: HybridSparseConfig, token_ids: torch.Tensor, decoded: int
) -> dict[str, float]:
    """Decode the last `decoded` tokens of a window; return their mean loss and what was kept and read.

    token_ids   [tokens] int64
    """
    record = KeptMass(settings.retained, PROMISE)
    losses = []
    with SparseSession(model, settings, max_tokens=len(token_ids), watch=record.watch) as session:
        cache = DynamicCache()
        model(token_ids[None, : -decoded - 1], past_key_values=cache, logits_to_keep=1)
        session.runtime.take_stats()
        for position in range(len(token_ids) - decoded - 1, len(token_ids) - 1):
            logits = model(token_ids[None, position : position + 1], past_key_values=cache).logits[0, -1]
            losses.append(torch.nn.functional.cross_entropy(logits.float(), token_ids[position + 1]))
        stats = session.runtime.take_stats()
    return {
        "loss": float(torch.stack(losses).mean()),
        "bytes_read": stats.read_bytes / stats.total_bytes,
        **record.summary(),
    }


def mean_rows(windows: list[dict[str, float]]) -> dict[str, float]:
    """The means over windows of equal size, the worst of the worst, and the perplexity."""
    row = {name: sum(window[name] for window in windows) / len(windows) for name in windows[0]}
    row["kept_worst"] = min(window["kept_worst"] for window in windows)
    row["perplexity"] = math.exp(row.pop("loss"))
    return row


def main() -> None:
    """Run what is missing, print the table, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path, help="a plain text, UTF-8")
    parser.add_argument("--model", default=None, type=Path, help="instead of SmolLM2-135M-Instruct")
    parser.add_argument("--windows", default=8, type=int, help="windows from the start of the text")
    parser.add_argument("--tokens", default=4096, type=int, help="of a window")
    parser.add_argument("--decoded", default=256, type=int, help="last tokens of a window that are decoded")
    parser.add_argument("--selections", default=",".join(SELECTIONS), help="comma-separated")
    parser.add_argument("--out", default=None, type=Path, help="JSON file of windows done, read and added to")
    options = parser.parse_args()
    unknown = set(options.selections.split(",")) - set(SELECTIONS)
    if unknown:
        parser.error(f"--selections={','.join(sorted(unknown))}: must be among {', '.join(SELECTIONS)}")
    path = options.model or model_dir()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    token_ids = AutoTokenizer.from_pretrained(path)(options.text.read_text(encoding="utf-8"), return_tensors="pt")
    windows = token_ids.input_ids[0].split(options.tokens)[: options.windows]
    if len(windows) < options.windows or len(windows[-1]) < options.tokens:
        parser.error(f"--windows={options.windows}: the text has {token_ids.input_ids.numel()} tokens")

    size = f"{options.tokens}-{options.decoded}"
    done: dict[str, dict[str, float]] = {}
    if options.out and options.out.exists():
        done = json.loads(options.out.read_text())
    for name in options.selections.split(","):
        settings = HybridSparseConfig.from_mapping(SELECTIONS[name])
        for index, window in enumerate(tqdm(windows, desc=name, unit="window")):
            key = f"{name} {size} {index}"
            if key not in done:
                done[key] = run_window(model, settings, window, options.decoded)
                if options.out:
                    options.out.write_text(json.dumps(done, indent=1))
    rows = {
        name: mean_rows([done[f"{name} {size} {index}"] for index in range(options.windows)])
        for name in options.selections.split(",")
    }
    save("perplexity", {"text": options.text.name, "windows": options.windows, "size": size, "rows": rows})
    print(table(rows))


def table(rows: dict[str, dict[str, float]]) -> str:
    """The rows as Markdown, perplexity beside full attention's where that was run."""
    full = rows.get("full", {}).get("perplexity")
    lines = []
    for name, row in rows.items():
        above = f" ({row['perplexity'] / full - 1:+.2%})" if full else ""
        lines.append(
            (
                name,
                f"{row['perplexity']:.3f}{above}",
                f"{row['pages_read']:.1%}",
                f"{row['oracle_pages_read']:.1%}",
                f"{row['bytes_read']:.1%}",
                f"{row['kept_mean']:.4f}",
                f"{row['kept_at_least_0.95']:.2%}",
                f"{row['kept_at_least_0.90']:.2%}",
                f"{row['kept_at_least_0.85']:.2%}",
                f"{row['kept_worst']:.3f}",
            )
        )
    headings = (
        "selection",
        "perplexity",
        "candidate pages read",
        f"oracle's for {PROMISE}",
        "KV bytes read",
        "kept, mean",
        "kept ≥ 0.95",
        "≥ 0.90",
        "≥ 0.85",
        "worst",
    )
    return markdown_table(headings, lines)


if __name__ == "__main__":
    main()
