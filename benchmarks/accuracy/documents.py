"""Questions about long documents: L-Eval's JSONL files, named by path.

A line has `input` (the document), `instructions` (what is asked about it) and `outputs` (a reference for each).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rouge_score.rouge_scorer import RougeScorer

CUT_MARK = "\n[...]\n"


@dataclass(frozen=True, slots=True)
class DocumentQuestion:
    """One instruction on one document."""

    document: str
    instruction: str
    reference: str


def read_questions(path: Path) -> list[DocumentQuestion]:
    """The first instruction of every document, then the second of each that has one, and so on.

    In this order many documents come before many questions about one, and later instructions may be turns of a
    conversation.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    missing = [number for number, line in enumerate(lines, 1) if not {"input", "instructions", "outputs"} <= set(line)]
    if missing or not lines:
        raise ValueError(f"{path.name}: every line needs input, instructions and outputs; line {missing[:1]} has not")
    turns = max(len(line["instructions"]) for line in lines)
    return [
        DocumentQuestion(line["input"], line["instructions"][turn].strip(), line["outputs"][turn].strip())
        for turn in range(turns)
        for line in lines
        if turn < len(line["instructions"])
    ]


def cut_in_the_middle(
    document: str,
    tokens: int,
    *,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> tuple[str, int]:
    """The document and 0 if it has at most `tokens` tokens; else its two ends, about half each, with `CUT_MARK`
    between them, and the number of tokens left out.
    """
    ids = list(encode(document))
    if len(ids) <= tokens:
        return document, 0
    keep = tokens - len(encode(CUT_MARK))
    if keep < 2:
        raise ValueError(f"tokens={tokens}: too few for any of the document")
    head, tail = keep - keep // 2, keep // 2
    return decode(ids[:head]) + CUT_MARK + decode(ids[len(ids) - tail :]), len(ids) - keep


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L, F-measure, words stemmed."""
    return float(RougeScorer(["rougeL"], use_stemmer=True).score(reference, answer)["rougeL"].fmeasure)
