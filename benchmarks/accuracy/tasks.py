"""Task scores, and agreement with full attention's own answers, by selection: RULER-like tasks and long documents.

    python -m benchmarks.accuracy.tasks [--model PATH] [--lengths 1024,2048] [--tasks all] [--samples 4] --out FILE
    python -m benchmarks.accuracy.tasks --tasks "" --documents PATH.jsonl --out FILE

Every prompt is prefilled once by exact attention but for its last token, which is the first that each selection
decodes. Selections decode twice: along full attention's answer, which is fed whatever they say, and, from their first
difference on, on their own. With `--out FILE` rows that it holds are kept and only the rest is run.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.accuracy.answers import Answer, Prefill, answer
from benchmarks.accuracy.prompts import FORMATS, Prompt, PromptMaker
from benchmarks.accuracy.rows import OtherCommitError, Row, RowFile
from benchmarks.accuracy.ruler import TASKS
from benchmarks.accuracy.ruler.haystacks import prose_or_text
from benchmarks.accuracy.selections import FULL, chosen, runs_on
from benchmarks.accuracy.summaries import summarise, table
from benchmarks.machine import commit
from benchmarks.report import save
from vllm_hybrid_sparse.cli.smollm2 import model_dir


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt of a run: a RULER-like task, or a file of documents."""

    task: str
    tokens: int
    sample: int
    document: Path | None = None

    def prompt(self, maker: PromptMaker, options: argparse.Namespace) -> Prompt:
        """Make it."""
        if self.document:
            return maker.document(self.document, self.tokens, self.sample, options.document_answer_tokens)
        return maker.ruler(self.task, self.tokens, self.sample, prose_or_text(options.text), options.seed)

    def identity(self, options: argparse.Namespace) -> dict[str, object]:
        """All that a row of this case depends on but its selection and the commit."""
        own: dict[str, object] = (
            {"new_tokens": options.document_answer_tokens}
            if self.document
            else {"seed": options.seed, "text": options.text.name if options.text else "generated prose"}
        )
        return {
            "task": self.task,
            "tokens": self.tokens,
            "sample": self.sample,
            "model": options.model.name,
            "dtype": options.dtype,
            "format": options.format,
            **own,
        }


def cases_of(options: argparse.Namespace, model_tokens: int) -> list[Case]:
    """Every prompt of a run, short ones first."""
    names = list(TASKS) if options.tasks == "all" else [name for name in options.tasks.split(",") if name]
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ValueError(f"--tasks={','.join(unknown)}: must be among {', '.join(TASKS)}")
    lengths = sorted(int(length) for length in options.lengths.split(","))
    if lengths[-1] > model_tokens:
        raise ValueError(f"--lengths={lengths[-1]}: the model has {model_tokens} positions")
    samples = range(options.samples)
    ruler = [Case(name, length, sample) for length in lengths for sample in samples for name in names]
    document_tokens = min(options.document_tokens or model_tokens, model_tokens)
    documents = [
        Case(path.stem, document_tokens, sample, path) for sample in samples for path in options.documents or []
    ]
    return ruler + documents


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
    """The case's rows, those that are missing measured; full attention's first, since all are compared with it."""
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
    parser.add_argument("--model", default=None, type=Path, help="instead of SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--format", default="chat", choices=FORMATS, help="the model's chat template or plain text")
    parser.add_argument("--tasks", default="all", help="RULER-like ones, comma-separated; empty: none")
    parser.add_argument("--lengths", default="1024,2048", help="tokens of a prompt with its answer, comma-separated")
    parser.add_argument("--samples", default=4, type=int, help="prompts of each task and length, and of each file")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--text", default=None, type=Path, help="haystack, instead of generated prose")
    parser.add_argument("--documents", nargs="*", type=Path, help="JSONL files as of L-Eval")
    parser.add_argument("--document-tokens", default=None, type=int, help="longer ones are cut; default: the model's")
    parser.add_argument("--document-answer-tokens", default=64, type=int)
    parser.add_argument("--selections", default="main", help="comma-separated names or groups; full is always run")
    parser.add_argument("--out", default=None, type=Path, help="JSONL file of rows, read and added to")
    parser.add_argument("--redo", action="store_true", help="drop rows of --out that another commit has measured")
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
