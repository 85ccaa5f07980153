"""Task scores, and agreement with full attention's own answers, by selection: RULER-like tasks and long documents.

    python -m benchmarks.accuracy.tasks [--model PATH] [--lengths 1024,2048] [--tasks all] [--samples 4] --out FILE
    python -m benchmarks.accuracy.tasks --tasks "" --documents PATH.jsonl --out FILE

Exact attention prefills every prompt once, except its last token, which is the first that each selection decodes.
Selections decode twice: along full attention's answer, which is fed whatever they say, and on their own from their
first difference on. With `--out FILE`, rows that FILE holds are kept and only the rest is run.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.accuracy.answers import Answer, Prefill, answer
from benchmarks.accuracy.cases import Case, add_options, cases_of
from benchmarks.accuracy.prompts import Prompt, PromptMaker
from benchmarks.accuracy.rows import OtherCommitError, Row, RowFile
from benchmarks.accuracy.selections import FULL, chosen, runs_on
from benchmarks.accuracy.summaries import summarise, table
from benchmarks.machine import commit
from benchmarks.report import save
from vllm_hybrid_sparse.cli.smollm2 import model_dir


def measured(said: Answer, text: str, prompt: Prompt, full: list[int]) -> Row:
    """What a row keeps of an answer."""
    stats = said.stats
    return {
        "score": prompt.score(text),
        **said.agreement(full),
        "bytes_read": stats.read_bytes / stats.total_bytes,
        **said.record.summary(),
        "by_head": said.record.by_head(),
        "prompt_tokens": len(prompt.token_ids),
        "cut_tokens": prompt.cut_tokens,
        "answer": text,
        "answer_ids": said.token_ids,
        "references": list(prompt.references),
    }


def run_case(
    model: PreTrainedModel, tokenizer: Any, maker: PromptMaker, case: Case, rows: RowFile, options: argparse.Namespace
) -> Iterator[Row]:
    """The case's rows; missing ones are measured. Full attention's is first, since all are compared with it."""
    names = chosen(options.selections)
    identities = {name: case.identity(options) | {"selection": name, "runs_on": runs_on(name)} for name in names}
    if all(rows.get(identities[name]) for name in names):
        yield from (row for name in names if (row := rows.get(identities[name])))
        return
    prompt = case.prompt(maker, options)
    prefill = Prefill(model, torch.tensor(prompt.token_ids), new_tokens=prompt.new_tokens)
    stops = _stop_tokens(model, tokenizer)
    full: list[int] = []
    for name in names:
        row = rows.get(identities[name])
        if row is None:
            said = answer(prefill, name, None if name == FULL else full, prompt.new_tokens, stops)
            text = tokenizer.decode(said.token_ids, skip_special_tokens=True)
            row = rows.add(identities[name], measured(said, text, prompt, full or said.token_ids))
        if name == FULL:
            full = list(cast("Sequence[int]", row["answer_ids"]))
        yield row


def _stop_tokens(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    named = model.generation_config.eos_token_id if model.generation_config else None
    stops = set(named) if isinstance(named, list) else {named}
    return {stop for stop in stops | {tokenizer.eos_token_id} if stop is not None}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, dtype="float32", selections="main")
    options = parser.parse_args(arguments)
    options.selections = f"{FULL},{options.selections}"
    options.model = options.model or model_dir()
    return options


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run what is missing, print the table, keep the result; return all rows."""
    options = parse_arguments(arguments)
    try:
        chosen(options.selections)
        rows = RowFile(options.out, commit(), redo=options.redo)
    except (OtherCommitError, ValueError) as error:
        raise SystemExit(f"tasks: {error}") from None
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    try:
        cases = cases_of(options, model.config.max_position_embeddings)
        maker = PromptMaker(tokenizer, options.format)
    except ValueError as error:
        raise SystemExit(f"tasks: {error}") from None
    done: list[Row] = []
    with tqdm(cases, unit="prompt") as progress:
        for case in progress:
            progress.set_description(f"{case.task} {case.tokens}")
            done += run_case(model, tokenizer, maker, case, rows, options)
    summaries = summarise(done)
    print(table(summaries))
    save("tasks", {"rows": summaries})
    return done


if __name__ == "__main__":
    main()
