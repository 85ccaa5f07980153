"""Traces made up from RULER-like tasks."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from vllm_hybrid_sparse.cli.prose import prose
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.mixes import Lengths
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.ruler import TASKS
from vllm_hybrid_sparse.load.task_mix import TaskWeights, task_mix
from vllm_hybrid_sparse.load.task_samples import measured_tokens
from vllm_hybrid_sparse.load.task_tokens import TaskTokens

ALL = TaskWeights.parse("tasks", "all")
FOUR = dict.fromkeys(TASKS, TaskTokens.usual())  # characters a token


class CountingSide:
    """Counts a token for every digit and sign, and one for every three letters of a word begun."""

    name = "counting"

    def __init__(self, counts: bool = True) -> None:
        self.asked: list[Request] = []
        self._counts = counts

    async def ask(self, request: Request) -> SimpleNamespace:
        self.asked.append(request)
        return SimpleNamespace(prompt_tokens=count(request.prompt) if self._counts else None)


def count(prompt: object) -> int:
    signs = sum(not (sign.isalpha() or sign.isspace()) for sign in str(prompt))
    letters = "".join(sign if sign.isalpha() else " " for sign in str(prompt))
    return 5 + signs + sum(-(-len(word) // 3) for word in letters.split())


def measured(side: CountingSide, lengths: Lengths, said: list[str] | None = None) -> dict[str, TaskTokens]:
    say = (lambda _line: None) if said is None else said.append
    return asyncio.run(measured_tokens(side, ALL, lengths, prose, 0, say=say))


def mix(
    tasks: TaskWeights = ALL, tokens: str = "1200", count: int = 40, seed: int = 0, **more: object
) -> list[Request]:
    return task_mix(tasks, Lengths.parse("task-tokens", tokens), FOUR, prose, count, seed, **more)


def test_the_same_seed_asks_the_same_and_another_something_else() -> None:
    assert mix() == mix()
    assert {request.prompt for request in mix()}.isdisjoint(request.prompt for request in mix(seed=1))


def test_weights_say_how_often_a_task_and_a_length_are_drawn() -> None:
    requests = mix(TaskWeights.parse("tasks", "niah_single_1:3,qa_1"), "300:1,600:4", 1000)
    tasks = Counter(request.source for request in requests)
    assert tasks["niah_single_1"] / 1000 == pytest.approx(0.75, abs=0.05)
    assert set(tasks) == {"niah_single_1", "qa_1"}
    assert sum(request.size() > 1500 for request in requests) / 1000 == pytest.approx(0.8, abs=0.05)


def test_no_two_prompts_begin_alike_even_in_noise() -> None:
    requests = mix(TaskWeights.parse("tasks", "niah_single_1"), count=30)
    assert len({str(request.prompt)[:12] for request in requests}) == 30


def test_a_prompt_holds_a_question_with_its_answer_begun_and_room_for_it() -> None:
    for request in mix(count=60):
        assert request.max_tokens == TASKS[str(request.source)].new_tokens
        assert request.ignore_eos
        assert request.group is None
    (request,) = mix(TaskWeights.parse("tasks", "vt"), count=1, output=Lengths((9,), (1.0,)), ignore_eos=False)
    assert (request.max_tokens, request.ignore_eos) == (9, False)
    assert "Which variables have the value" in str(request.prompt)
    assert str(request.prompt).endswith(" are")


@pytest.mark.parametrize("tokens", [1000, 6000])
def test_prompts_of_every_task_are_near_their_length_by_the_server_s_count(tokens: int) -> None:
    side, lengths = CountingSide(), Lengths((tokens,), (1.0,))
    requests = task_mix(ALL, lengths, measured(side, lengths), prose, 80, 3)
    assert {request.source for request in requests} == set(TASKS)
    for request in requests:
        off = 0.2 if request.source == "fwe" else 0.1
        assert count(request.prompt) == pytest.approx(tokens, rel=off), request.source


def test_samples_are_no_longer_than_the_longest_prompt_and_one_token_is_asked_for() -> None:
    side = CountingSide()
    measured(side, Lengths((700, 1100), (1.0, 1.0)))
    assert len(side.asked) == 2 * len(TASKS)
    assert all(count(request.prompt) <= 1100 and request.max_tokens == 1 for request in side.asked)


def test_a_server_that_does_not_count_is_told_of_and_four_characters_are_a_token() -> None:
    said: list[str] = []
    tokens_of = measured(CountingSide(counts=False), Lengths((1000,), (1.0,)), said)
    assert "counting: does not count prompts of vt; a token counts as 4 characters" in said
    assert tokens_of["vt"].of("x" * 400) == pytest.approx(100)


def test_a_line_goes_through_both_prompts_or_from_nothing_through_one() -> None:
    line = TaskTokens.between(("x" * 100, 60), ("x" * 500, 160))
    assert [line.of("x" * size) for size in (100, 500, 900)] == [60, 160, 260]
    for longer in (None, ("x" * 100, 61), ("x" * 500, 50)):
        assert TaskTokens.between(("x" * 100, 50), longer).of("x" * 200) == 100


def test_all_names_every_task_and_weights_of_one_named_twice_add_up() -> None:
    assert set(ALL.names) == set(TASKS)
    assert TaskWeights.parse("tasks", "vt") == TaskWeights(("vt",), (1.0,))
    twice = TaskWeights.parse("tasks", "all:0.5,vt:2")
    assert [weight for name, weight in zip(twice.names, twice.weights, strict=True) if name == "vt"] == [0.5, 2.0]


@pytest.mark.parametrize("text", ["", "niah", "vt,", "vt:x", "vt:0", "vt:-1", "vt:inf", "vt:nan", "all:0", "VT"])
def test_tasks_that_are_none_are_refused_by_option_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^tasks={text}: "):
        TaskWeights.parse("tasks", text)


@pytest.mark.parametrize(
    ("tasks", "tokens", "said"),
    [
        ("niah_single_1,cwe", "1000,90", r"^task-tokens=90: must be at least \d+ for cwe, its shortest prompt"),
        ("niah_multikey_2", "300000", r"^task-tokens=300000: niah_multikey_2 has no prompt of this length"),
        (
            "qa_1",
            "400000",
            r"^task-tokens=400000: qa_1 has no prompt of this length \(count=\d+: there are \d+ persons",
        ),
    ],
)
def test_a_length_that_a_task_cannot_have_is_refused(tasks: str, tokens: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        mix(TaskWeights.parse("tasks", tasks), tokens, 1)


def test_no_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^requests=0: "):
        mix(count=0)
