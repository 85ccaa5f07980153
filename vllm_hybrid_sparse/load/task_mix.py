"""Traces made from RULER-like tasks, with fixed seeds: the same arguments give the same requests."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Self

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.mixes import Lengths
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.ruler import TASKS, Question, fit_question, shortest_question
from vllm_hybrid_sparse.load.ruler.haystacks import Filler
from vllm_hybrid_sparse.load.task_tokens import TaskTokens

ALL = "all"


@dataclass(frozen=True, slots=True)
class TaskWeights:
    """Names of tasks, each drawn in proportion to its weight."""

    names: tuple[str, ...]
    weights: tuple[float, ...]

    @classmethod
    def parse(cls, option: str, text: str) -> Self:
        """Read `NAME[:WEIGHT],…`, e.g. ``niah_single_1:3,vt``; a weight left out is 1, and `all` names every task."""
        names: list[str] = []
        weights: list[float] = []
        for item in text.split(","):
            name, _, weight = item.partition(":")
            if name not in TASKS and name != ALL:
                raise ConfigError(f"{option}={text}: {name!r} is no task; they are {ALL}, {', '.join(TASKS)}")
            try:
                value = float(weight) if weight else 1.0
            except ValueError as error:
                raise ConfigError(f"{option}={text}: must be NAME[:WEIGHT],…, not {item!r}") from error
            if not 0 < value < float("inf"):
                raise ConfigError(f"{option}={text}: weights must be above 0, finite")
            chosen = tuple(TASKS) if name == ALL else (name,)
            names += chosen
            weights += [value] * len(chosen)
        return cls(tuple(names), tuple(weights))

    def draw(self, rng: random.Random) -> str:
        """Return one of the names."""
        return rng.choices(self.names, self.weights)[0]


def task_mix(
    tasks: TaskWeights,
    lengths: Lengths,
    tokens_of: Mapping[str, TaskTokens],
    filler: Filler,
    count: int,
    seed: int,
    *,
    output: Lengths | None = None,
    ignore_eos: bool = True,
) -> list[Request]:
    """Return `count` questions of RULER-like tasks, each with a text of its own; no two begin alike.

    lengths     of the prompts in tokens: each is the longest of its task that `tokens_of` estimates at no more
    tokens_of   how long prompts are, for each of `tasks`: from `measured_tokens`, or from a tokenizer's counts
    filler      the sentences in which some of the tasks hide their facts
    output      most tokens of an answer; None: what a right answer to the task needs
    raises      ConfigError if a task has no prompt as short, or as long, as a length
    """
    if count < 1:
        raise ConfigError(f"requests={count}: must be at least 1")
    check_lengths(tasks, lengths, tokens_of, filler, seed)
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    requests = []
    for number in range(count):
        task, length = tasks.draw(rng), lengths.draw(rng)
        prompt = _prompt(task, length, number, tokens_of[task], filler, seed)
        max_tokens = TASKS[task].new_tokens if output is None else output.draw(rng)
        requests.append(Request(prompt=prompt, max_tokens=max_tokens, ignore_eos=ignore_eos, source=task))
    return requests


def check_lengths(
    tasks: TaskWeights, lengths: Lengths, tokens_of: Mapping[str, TaskTokens], filler: Filler, seed: int
) -> None:
    """Raise ConfigError, which names the length and the task, if a length is below a task's shortest prompt."""
    for task, length in product(dict.fromkeys(tasks.names), lengths.tokens):
        shortest = round(tokens_of[task].of(shortest_prompt(task, filler, seed)))
        if length < shortest:
            raise ConfigError(f"task-tokens={length}: must be at least {shortest} for {task}, its shortest prompt")


def shortest_prompt(task: str, filler: Filler, seed: int) -> str:
    """Return the prompt of a task with as little text as it can have."""
    return _text(shortest_question(task, 0, filler=filler, seed=seed), 0)


def prompt_of_characters(task: str, characters: int, filler: Filler, seed: int) -> str:
    """Return the longest prompt of a task with at most so many characters; ValueError if there is none."""
    room = characters + TASKS[task].new_tokens
    question = fit_question(task, room, 0, count_tokens=lambda asked: len(_text(asked, 0)), filler=filler, seed=seed)
    return _text(question, 0)


def _prompt(task: str, length: int, number: int, tokens: TaskTokens, filler: Filler, seed: int) -> str:
    """Return the prompt of request `number`, from 0: questions of a mix are numbered from 1, samples are number 0."""

    def count_tokens(question: Question) -> int:
        return round(tokens.of(_text(question, number + 1)))

    try:
        room = length + TASKS[task].new_tokens
        question = fit_question(task, room, number, count_tokens=count_tokens, filler=filler, seed=seed)
    except ValueError as error:
        raise ConfigError(f"task-tokens={length}: {task} has no prompt of this length ({error})") from error
    return _text(question, number + 1)


def _text(question: Question, number: int) -> str:
    """Return a prompt with the begun answer; the number makes it begin as no other, which noise alone would not."""
    return f"Question {number}. {question.prompt()}\n{question.answer_begin}"
