"""Perplexity, kept attention weight and KV read by selection, against full attention, on the windows of a text.

    python -m benchmarks.accuracy.perplexity --text PATH [--model PATH] [--windows 8] [--selections full,codes2-5%]

The shipped kernels run inside Transformers (`vllm_hybrid_sparse.hf`); `oracle` and `random` selections run
on the reference in plain torch. Each window is prefilled densely, once for all selections. Then its last tokens are
decoded one after another, and the true token is fed whatever the model says. All tokens are known, so each layer
decodes them in one call (`row_by_row`). With `--out FILE`, rows that FILE holds are kept and only the rest is run.
"""

import argparse
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.accuracy.answers import Prefill
from benchmarks.accuracy.kept_mass import KeptMass
from benchmarks.accuracy.rows import OtherCommitError, Row, RowFile
from benchmarks.accuracy.selections import PROMISE, chosen, open_decoding, retained_of, runs_on
from benchmarks.accuracy.step_batches import in_batches
from benchmarks.accuracy.summaries import PERPLEXITY, summarise
from benchmarks.machine import commit
from benchmarks.report import markdown_table, save
from benchmarks.serving.backends import DTYPES
from vllm_hybrid_sparse.cli.smollm2 import model_dir

KV_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn}


def run_window(prefill: Prefill, selection: str, decoded: torch.Tensor) -> dict[str, object]:
    """Decode the last tokens of a window; return their mean loss and what was kept and read.

    prefill   of everything before `decoded`
    decoded   [tokens] int64
    """
    record = KeptMass(retained_of(selection), PROMISE)
    with (
        in_batches(record.watch) as watch,
        open_decoding(
            prefill.model, selection, max_tokens=prefill.max_tokens, watch=watch, kv_dtype=prefill.kv_dtype
        ) as decoding,
    ):
        prefill.rewind(decoding)
        logits = prefill.follow(decoding, [prefill.last_token, *decoded[:-1].tolist()])
        stats = decoding.take_stats()
    return {
        "loss": float(torch.nn.functional.cross_entropy(logits, decoded)),
        "bytes_read": stats.read_bytes / stats.total_bytes,
        "anchor_bytes_read": stats.anchor_bytes / stats.total_bytes,
        **record.summary(),
        "by_head": record.by_head(),
        "oracle_deciles": record.oracle_deciles(),
    }


def run(model: PreTrainedModel, windows: list[torch.Tensor], rows: RowFile, options: argparse.Namespace) -> list[Row]:
    """Every window's row for every selection; missing ones are measured."""
    done = []
    for index, window in enumerate(tqdm(windows, unit="window")):
        prefill: Prefill | None = None
        for selection in tqdm(chosen(options.selections), desc=f"window {index}", leave=False):
            identity = {
                "task": PERPLEXITY,
                "tokens": options.tokens,
                "decoded": options.decoded,
                "window": index,
                "text": options.text.name,
                "model": options.model.name,
                "dtype": options.dtype,
                **({"kv_cache_dtype": options.kv_cache_dtype} if options.kv_cache_dtype != "auto" else {}),
                "selection": selection,
                "runs_on": runs_on(selection),
            }
            row = rows.get(identity)
            if row is None:
                prefill = prefill or Prefill(
                    model,
                    window[: -options.decoded],
                    new_tokens=options.decoded,
                    kv_dtype=KV_DTYPES[options.kv_cache_dtype],
                )
                row = rows.add(identity, run_window(prefill, selection, window[-options.decoded :]))
            done.append(row)
    return done


def main() -> None:
    """Run what is missing, print the table, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path, help="a plain text, UTF-8")
    parser.add_argument("--model", default=None, type=Path, help="instead of SmolLM2-135M-Instruct")
    parser.add_argument("--windows", default=8, type=int, help="windows from the start of the text")
    parser.add_argument("--tokens", default=4096, type=int, help="of a window")
    parser.add_argument("--decoded", default=256, type=int, help="last tokens of a window that are decoded")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="(%(default)s)")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_DTYPES, help="auto: the model's (%(default)s)")
    parser.add_argument("--selections", default="main", help="comma-separated names or groups")
    parser.add_argument("--out", default=None, type=Path, help="JSONL file of rows, read and added to")
    parser.add_argument("--redo", action="store_true", help="drop rows of --out that another commit has measured")
    options = parser.parse_args()
    try:
        chosen(options.selections)
        kept = RowFile(options.out, commit(), redo=options.redo)
    except (OtherCommitError, ValueError) as error:
        parser.error(str(error))
    options.model = options.model or model_dir()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    token_ids = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    windows = split_windows(token_ids, tokenizer.bos_token_id, options.tokens)[: options.windows]
    if len(windows) < options.windows:
        parser.error(f"--windows={options.windows}: the text has {len(token_ids)} tokens")

    summaries = summarise(run(model, windows, kept, options))
    rows = {str(summary["selection"]): summary for summary in summaries}
    size = f"{options.tokens}-{options.decoded}"
    save(
        "perplexity",
        {
            "text": options.text.name,
            "windows": options.windows,
            "size": size,
            "dtype": options.dtype,
            "kv_cache_dtype": options.kv_cache_dtype,
            "rows": rows,
        },
    )
    print(table(rows))


def split_windows(token_ids: torch.Tensor, begin: int | None, tokens: int) -> list[torch.Tensor]:
    """Whole consecutive windows, each beginning with `begin` if the text does.

    token_ids   [tokens of the text] int64, as the tokenizer gives them
    begin       the tokenizer's token for the beginning of a sequence; None: it has none
    tokens      length of a window
    """
    first = token_ids[:1] if begin is not None and token_ids[0] == begin else token_ids[:0]
    text = token_ids[len(first) :].split(tokens - len(first))
    return [torch.cat((first, part)) for part in text if len(part) == tokens - len(first)]


def table(rows: dict[str, dict[str, float]]) -> str:
    """The rows as Markdown; perplexity with its difference from full attention's, if that was run."""
    full = rows.get("full", {}).get("perplexity")
    lines = []
    for name, row in rows.items():
        above = f" ({row['perplexity'] / full - 1:+.2%})" if full else ""
        lines.append(
            (
                name,
                str(row["runs_on"]),
                f"{row['perplexity']:.3f}{above}",
                f"{row['pages_read']:.1%}",
                f"{row['oracle_pages_read']:.1%}",
                f"{row['bytes_read']:.1%}",
                f"{row['anchor_bytes_read']:.1%}",
                f"{row['kept_mean']:.4f}",
                f"{row['kept_at_least_0.95']:.2%}",
                f"{row['kept_at_least_0.90']:.2%}",
                f"{row['kept_at_least_0.85']:.2%}",
                f"{row['kept_worst']:.3f}",
                f"{row['output_error_mean']:.3f}",
            )
        )
    headings = (
        "selection",
        "runs on",
        "perplexity",
        "candidate pages read",
        f"oracle's for {PROMISE}",
        "KV bytes read",
        "and for anchors",
        "kept, mean",
        "kept ≥ 0.95",
        "≥ 0.90",
        "≥ 0.85",
        "worst",
        "output error",
    )
    return markdown_table(headings, lines)


if __name__ == "__main__":
    main()
