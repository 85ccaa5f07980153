"""Which prompts a run of tasks asks: RULER-like ones of each length, and questions on files of documents."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.haystacks import prose_or_text
from benchmarks.accuracy.prompts import FORMATS, Prompt, PromptMaker
from benchmarks.serving.backends import DTYPES
from vllm_hybrid_sparse.load.ruler import TASKS


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt of a run: a RULER-like task, or a file of documents."""

    task: str
    tokens: int
    sample: int
    document: Path | None = None

    def prompt(self, maker: PromptMaker, options: argparse.Namespace) -> Prompt:
        """Make the prompt."""
        if self.document:
            return maker.document(self.document, self.tokens, self.sample, options.document_answer_tokens)
        return maker.ruler(self.task, self.tokens, self.sample, prose_or_text(options.text), options.seed)

    def identity(self, options: argparse.Namespace) -> dict[str, object]:
        """All that a row of this case depends on, except its selection and the commit."""
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


def add_options(parser: argparse.ArgumentParser, *, dtype: str, selections: str) -> None:
    """Add the options for prompts, model and row file; `dtype` and `selections` are defaults."""
    parser.add_argument("--model", default=None, type=Path, help="instead of SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default=dtype, choices=DTYPES, help="%(default)s unless given")
    parser.add_argument("--format", default="chat", choices=FORMATS, help="the model's chat template or plain text")
    parser.add_argument("--tasks", default="all", help="RULER-like ones, comma-separated; empty: none")
    parser.add_argument("--lengths", default="1024,2048", help="tokens of a prompt with its answer, comma-separated")
    parser.add_argument("--samples", default=4, type=int, help="prompts of each task and length, and of each file")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--text", default=None, type=Path, help="haystack, instead of generated prose")
    parser.add_argument("--documents", nargs="*", type=Path, help="JSONL files as of L-Eval")
    parser.add_argument("--document-tokens", default=None, type=int, help="longer ones are cut; default: the model's")
    parser.add_argument("--document-answer-tokens", default=64, type=int)
    parser.add_argument("--selections", default=selections, help="comma-separated names; full is always run")
    parser.add_argument("--out", default=None, type=Path, help="JSONL file of rows, read and added to")
    parser.add_argument("--redo", action="store_true", help="drop rows of --out that another commit has measured")
