"""Task scores through the HTTP server, by selection and for stock vLLM: RULER-like tasks and long documents.

    python -m benchmarks.accuracy.served_tasks [--lengths 4096] [--samples 8] [--selections stock,quest-5%] --out FILE

Prompts and selections are those of `benchmarks.accuracy.tasks`, but each selection is a server that is asked one prompt
after another. All our servers compute prompts alike, so two of them differ only in what decoding reads. `stock` also
differs by rounding, and shows what that alone does. After their first difference answers go their own ways: only
`tasks` can say how far tokens agree along full attention's answer. With `--out FILE`, rows that FILE holds are kept and
only the rest is run.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from benchmarks.accuracy.cases import Case, add_options, cases_of
from benchmarks.accuracy.prompts import Prompt, PromptMaker
from benchmarks.accuracy.rows import OtherCommitError, Row, RowFile
from benchmarks.accuracy.selections import FIXED_BUDGETS, FULL, SELECTIONS
from benchmarks.accuracy.summaries import summarise, table
from benchmarks.machine import commit
from benchmarks.report import save
from benchmarks.serving.backends import (
    START_TIMEOUT_S,
    our_args,
    serve_args,
    stop_servers_when_terminated,
    thread_env,
)
from benchmarks.serving.streams import stream_all
from vllm_hybrid_sparse.cli.kv_read import kv_bytes
from vllm_hybrid_sparse.cli.server import Server
from vllm_hybrid_sparse.cli.smollm2 import model_dir

SERVED: dict[str, Mapping[str, object] | None] = {
    **{name: settings for name, settings in SELECTIONS.items() if name not in FIXED_BUDGETS},
    "stock": None,
}
"""Settings of our backend by the name of the selection; stock vLLM has none."""


def chosen(names: str) -> list[str]:
    """The selections of a comma-separated list, full attention first.

    raises   ValueError if one is unknown
    """
    asked = [FULL, *(name for name in names.split(",") if name)]
    unknown = [name for name in asked if name not in SERVED]
    if unknown:
        raise ValueError(f"--selections={','.join(unknown)}: must be among {', '.join(SERVED)}")
    return list(dict.fromkeys(asked))


def identity_of(case: Case, selection: str, options: argparse.Namespace) -> dict[str, object]:
    """All that a row depends on, except the commit."""
    return case.identity(options) | {"selection": selection, "runs_on": "server"}


def agreement(own: Sequence[int], full: Sequence[int]) -> dict[str, float]:
    """The share of full attention's answer before the first difference, and whether there is none (0 or 1)."""
    before = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, full, strict=False)))
    return {"equal_before_difference": before / len(full), "exactly_equal": float(list(own) == list(full))}


def ask(server: Server, tokenizer: Any, prompt: Prompt) -> Row:
    """What a row keeps of the answer to one prompt; for ours also the KV bytes read, and those of the whole context."""
    before = kv_bytes(server.metrics())
    (stream,) = stream_all(server, [prompt.token_ids], prompt.new_tokens, may_end=True)
    text = tokenizer.decode(list(stream.token_ids), skip_special_tokens=True)
    after = kv_bytes(server.metrics())
    read = {"read_bytes": after[0] - before[0], "total_bytes": after[1] - before[1]} if before and after else {}
    return {
        "score": prompt.score(text),
        "prompt_tokens": len(prompt.token_ids),
        "cut_tokens": prompt.cut_tokens,
        "answer": text,
        "answer_ids": list(stream.token_ids),
        "references": list(prompt.references),
        **read,
    }


def run_selection(
    name: str,
    prompts: Mapping[Case, Prompt],
    tokenizer: Any,
    rows: RowFile,
    model_tokens: int,
    options: argparse.Namespace,
    log_path: Path,
) -> Iterator[tuple[Case, Row]]:
    """Serve a selection and yield its missing rows, in the order of the prompts; no server if none is missing."""
    missing = [case for case in prompts if rows.get(identity_of(case, name, options)) is None]
    if not missing:
        return
    settings = SERVED[name]
    room = serve_args(options.model, model_tokens, model_tokens + 1024, filled=False, dtype=options.dtype)
    args = [*room, "--enforce-eager"]
    if settings is not None:
        args += our_args(dict(settings))
    with Server(options.model, args, thread_env("all"), log_path) as server:
        server.wait_ready(START_TIMEOUT_S)
        for case in missing:
            said = ask(server, tokenizer, prompts[case])
            full = said if name == FULL else rows.get(identity_of(case, FULL, options))
            assert full is not None  # it is run first
            compared = agreement(cast("list[int]", said["answer_ids"]), cast("list[int]", full["answer_ids"]))
            yield case, rows.add(identity_of(case, name, options), said | compared)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, dtype="bfloat16", selections="stock,codes2-0.95,fluxion-codes2-16")
    options = parser.parse_args(arguments)
    options.model = options.model or model_dir()
    return options


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run what is missing, print the table, keep the result; return all rows."""
    options = parse_arguments(arguments)
    stop_servers_when_terminated()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model_tokens = AutoConfig.from_pretrained(options.model).max_position_embeddings
    try:
        names = chosen(options.selections)
        cases = cases_of(options, model_tokens)
        maker = PromptMaker(tokenizer, options.format)
        rows = RowFile(options.out, commit(), redo=options.redo)
    except (OtherCommitError, ValueError) as error:
        raise SystemExit(f"served_tasks: {error}") from None
    prompts = {case: case.prompt(maker, options) for case in tqdm(cases, unit="prompt", desc="making prompts")}
    with tempfile.TemporaryDirectory(prefix="served-tasks-") as folder, tqdm(unit="answer") as progress:
        for number, name in enumerate(names):
            log_path = Path(folder) / f"{number}.log"
            for case, row in run_selection(name, prompts, tokenizer, rows, model_tokens, options, log_path):
                progress.set_description(f"{name}: {case.task} {case.tokens}, score {row['score']:.2f}")
                progress.update()
    done = [rows.get(identity_of(case, name, options)) for name in names for case in cases]
    summaries = summarise(cast("list[Row]", done))
    print(table(summaries))
    save("served-tasks", {"rows": summaries})
    return cast("list[Row]", done)


if __name__ == "__main__":
    main()
