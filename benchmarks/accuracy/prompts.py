"""The prompts of tasks as token ids, and how their answers are scored."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.documents import cut_in_the_middle, read_questions, rouge_l
from vllm_hybrid_sparse.load.ruler import TASKS, Question, fit_question
from vllm_hybrid_sparse.load.ruler.haystacks import Filler

FORMATS = ("chat", "plain")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and how its answer is scored."""

    token_ids: list[int]
    new_tokens: int
    references: tuple[str, ...]
    score: Callable[[str], float]  # 0 to 1
    cut_tokens: int = 0  # left out of the middle of a document


class PromptMaker:
    """Makes prompts with one model's tokenizer."""

    def __init__(self, tokenizer: Any, style: str) -> None:
        """Take a Transformers tokenizer; `style` is chat (its template) or plain."""
        if style not in FORMATS:
            raise ValueError(f"style={style}: must be one of {', '.join(FORMATS)}")
        if style == "chat" and not getattr(tokenizer, "chat_template", None):
            raise ValueError("style=chat: the tokenizer has no chat template")
        self._tokenizer = tokenizer
        self._style = style

    def ruler(self, task: str, tokens: int, sample: int, filler: Filler, seed: int) -> Prompt:
        """A RULER-like question that fills `tokens` tokens, including the room for its answer."""
        question = fit_question(
            task, tokens, sample, count_tokens=lambda asked: len(self._question_ids(asked)), filler=filler, seed=seed
        )
        return Prompt(
            self._question_ids(question),
            TASKS[task].new_tokens,
            question.references,
            lambda answer: TASKS[task].score(answer, question.references),
        )

    def document(self, path: Path, tokens: int, sample: int, new_tokens: int) -> Prompt:
        """A question on a document of the file at `path`, cut in the middle so that it fits `tokens` with its answer.

        raises   ValueError if the file has fewer questions
        """
        questions = read_questions(path)
        if sample >= len(questions):
            raise ValueError(f"sample={sample}: {path.name} has {len(questions)} questions")
        asked = questions[sample]
        begin = f"{asked.instruction}\n\nDocument:\n"
        end = f"\n\n{asked.instruction} Answer in a few sentences."
        room = tokens - new_tokens - len(self._encode(begin + end, "")) - 4  # tokens may join differently at the seams
        document, cut_tokens = cut_in_the_middle(
            asked.document,
            room,
            encode=lambda text: self._tokenizer(text, add_special_tokens=False).input_ids,
            decode=self._tokenizer.decode,
        )
        return Prompt(
            self._encode(begin + document + end, ""),
            new_tokens,
            (asked.reference,),
            lambda answer: rouge_l(answer, asked.reference),
            cut_tokens,
        )

    def _question_ids(self, question: Question) -> list[int]:
        return self._encode(question.prompt(), question.answer_begin)

    def _encode(self, said: str, answer_begin: str) -> list[int]:
        if self._style == "plain":
            return list(self._tokenizer(f"{said}\n{answer_begin}" if answer_begin else f"{said}\n").input_ids)
        turns = [{"role": "user", "content": said}]
        text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(text + answer_begin, add_special_tokens=False).input_ids)
