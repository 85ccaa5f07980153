"""Every task at every length: its question can be answered from its text, and it fits."""

import random

import pytest

from vllm_hybrid_sparse.cli.prose import prose
from vllm_hybrid_sparse.load.ruler import TASKS, Question, fit_question
from vllm_hybrid_sparse.load.ruler.tasks import depth_of

RULER_TASKS = {
    *(f"niah_single_{number}" for number in (1, 2, 3)),
    *(f"niah_multikey_{number}" for number in (1, 2, 3)),
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
}  # fmt: skip


def count_words(question: Question) -> int:
    return len(f"{question.prompt()} {question.answer_begin}".split())


def question(task: str, tokens: int = 1500, sample: int = 0, seed: int = 0) -> Question:
    return fit_question(task, tokens, sample, count_tokens=count_words, filler=prose, seed=seed)


def test_all_thirteen_task_types_are_there() -> None:
    assert set(TASKS) == RULER_TASKS


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [300, 1500, 6000])
def test_a_prompt_fills_its_length_with_room_for_the_answer(task: str, tokens: int) -> None:
    length = count_words(question(task, tokens))
    assert tokens - TASKS[task].new_tokens - 60 <= length <= tokens - TASKS[task].new_tokens  # 60: two documents


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_can_be_read_in_the_context_and_is_not_given_away(task: str) -> None:
    for sample in range(5):
        asked = question(task, sample=sample)
        assert asked.facts
        assert all(fact in asked.context for fact in asked.facts)
        told = "\n".join((asked.asked, asked.answer_begin))
        for reference in asked.references:
            assert any(reference in fact for fact in asked.facts)
            assert reference not in told
            assert reference not in asked.instruction.split()


@pytest.mark.parametrize("task", TASKS)
def test_the_same_arguments_ask_the_same_and_others_something_else(task: str) -> None:
    asked = question(task)
    assert question(task) == asked
    assert question(task, sample=1).references != asked.references
    assert question(task, seed=1).references != asked.references


@pytest.mark.parametrize("task", [name for name in TASKS if name.startswith(("niah", "qa"))])
def test_the_first_fact_lies_at_the_depth_of_its_sample(task: str) -> None:
    for sample in range(6):
        asked = question(task, 3000, sample)
        place = asked.context.index(asked.facts[0]) / (len(asked.context) - len(asked.facts[0]))
        assert abs(place - depth_of(sample)) < 0.05, (sample, place)


def test_depths_of_few_samples_spread_over_the_text() -> None:
    for samples in (4, 6, 10):
        depths = sorted(depth_of(sample) for sample in range(samples))
        gaps = [high - low for low, high in zip([0.0, *depths], [*depths, 1.0], strict=True)]
        assert max(gaps) < 2.2 / samples


@pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_3", "qa_2"])
def test_a_length_that_nothing_fits_into_is_refused(task: str) -> None:
    with pytest.raises(ValueError, match="tokens=50: too few"):
        question(task, 50)


def test_what_is_asked_for_is_what_the_names_of_the_needle_tasks_say() -> None:
    assert len(question("niah_multivalue").references) == 4
    for fact in question("niah_multivalue").facts:
        assert fact.split(" is ")[0] == question("niah_multivalue").facts[0].split(" is ")[0]  # one key
    keys = {fact.split(" is ")[0] for fact in question("niah_multiquery").facts}
    assert len(keys) == 4
    assert question("niah_multikey_1").context.count("One secret number") == 4
    assert question("niah_single_2").context.count("One secret number") == 1
    assert question("niah_multikey_2").context.count(" has the number ") > 50
    assert len(question("niah_single_3").references[0]) == 36


def test_a_tracing_chain_leads_from_the_value_to_every_variable() -> None:
    asked = question("vt", sample=2)
    lines = [line.removeprefix("LET ").removesuffix(".") for line in asked.facts]
    values = dict(line.split(" = ") for line in lines)
    places = [asked.context.index(fact) for fact in asked.facts]
    assert places == sorted(places)
    for name in asked.references:
        held = name
        while held in values:
            held = values[held]
        assert f"value {held}" in asked.answer_begin
    assert len(asked.references) == 5


def test_the_common_words_are_the_ten_most_frequent() -> None:
    for tokens in (300, 1500, 6000):
        asked = question("cwe", tokens)
        words = asked.context.split()[1::2]
        counts = sorted(((words.count(word), word) for word in set(words)), reverse=True)
        assert {word for _, word in counts[:10]} == set(asked.references)
        assert counts[9][0] >= 3 * counts[10][0] > 0


def test_the_frequent_words_are_the_three_most_frequent_but_the_dots() -> None:
    for tokens in (300, 1500, 6000):
        asked = question("fwe", tokens)
        words = asked.context.split()
        counts = sorted(((words.count(word), word) for word in set(words)), reverse=True)
        assert counts[0][1] == "..."
        assert [word for _, word in counts[1:4]] == list(asked.references)
        assert counts[1][0] > counts[2][0] > counts[3][0] > counts[4][0]


def test_two_hops_take_two_documents() -> None:
    asked = question("qa_2", sample=3)
    life, place = asked.facts
    town = place.split(" is ")[0].removeprefix("The river of ")
    assert f" is {town}. " in life
    assert asked.references[0] in place
    assert asked.references[0] not in life
    assert asked.context.count(town) == 2


def test_random_state_outside_does_not_matter() -> None:
    random.seed(1)
    first = question("qa_1")
    random.seed(2)
    assert question("qa_1") == first
