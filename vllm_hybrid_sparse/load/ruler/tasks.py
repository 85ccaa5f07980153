"""The tasks by RULER's names, and a question of one of them that fills a given number of tokens."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from vllm_hybrid_sparse.load.ruler.facts import build_one_hop, build_two_hops
from vllm_hybrid_sparse.load.ruler.haystacks import Filler
from vllm_hybrid_sparse.load.ruler.needles import NeedleTask
from vllm_hybrid_sparse.load.ruler.question import Question, all_references, any_reference
from vllm_hybrid_sparse.load.ruler.tracing import build_tracing
from vllm_hybrid_sparse.load.ruler.word_counts import build_common_words, build_frequent_words

_GOLDEN = 0.6180339887  # multiples of it, modulo 1, cover 0 to 1 evenly however many there are


@dataclass(frozen=True, slots=True)
class Task:
    """How a task's questions are made and scored."""

    build: Callable[[random.Random, Filler, int, float], Question]  # rng, filler, units of context, depth of the answer
    new_tokens: int  # enough for a right answer
    score: Callable[[str, tuple[str, ...]], float] = all_references  # 0 to 1


TASKS: dict[str, Task] = {
    "niah_single_1": Task(NeedleTask(haystack="noise").build, 12),
    "niah_single_2": Task(NeedleTask().build, 12),
    "niah_single_3": Task(NeedleTask(kind="code").build, 40),
    "niah_multikey_1": Task(NeedleTask(keys=4).build, 12),
    "niah_multikey_2": Task(NeedleTask(haystack="needles").build, 12),
    "niah_multikey_3": Task(NeedleTask(haystack="needles", kind="code").build, 40),
    "niah_multivalue": Task(NeedleTask(values=4).build, 44),
    "niah_multiquery": Task(NeedleTask(keys=4, asked_keys=4).build, 44),
    "vt": Task(build_tracing, 30),
    "cwe": Task(build_common_words, 40),
    "fwe": Task(build_frequent_words, 20),
    "qa_1": Task(build_one_hop, 12, any_reference),
    "qa_2": Task(build_two_hops, 24, any_reference),
}


def depth_of(sample: int) -> float:
    """Where the answer of a task's sample lies, 0 to 1: any number of samples covers the text evenly."""
    return (0.5 + sample * _GOLDEN) % 1


def fit_question(
    task: str, tokens: int, sample: int, *, count_tokens: Callable[[Question], int], filler: Filler, seed: int = 0
) -> Question:
    """The longest question of at most `tokens` tokens with its answer's room; the same for the same arguments.

    count_tokens   tokens of the whole prompt that is made from a question
    raises         ValueError if not even the shortest fits, or if the task has too few words for one so long
    """
    limit = tokens - TASKS[task].new_tokens

    def build(units: int) -> Question:
        return _question(task, units, sample, f"{seed} {task} {tokens} {sample}", filler)

    fits, too_many = 1, 2
    if count_tokens(build(fits)) > limit:
        raise ValueError(f"tokens={tokens}: too few for {task}")
    while count_tokens(build(too_many)) <= limit:
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if count_tokens(build(middle)) <= limit:
            fits = middle
        else:
            too_many = middle
    return build(fits)


def shortest_question(task: str, sample: int, *, filler: Filler, seed: int = 0) -> Question:
    """Return a question with as little context as the task can have; the same for the same arguments."""
    return _question(task, 1, sample, f"{seed} {task} shortest {sample}", filler)


def _question(task: str, units: int, sample: int, seed: str, filler: Filler) -> Question:
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    return TASKS[task].build(rng, filler, units, depth_of(sample))
