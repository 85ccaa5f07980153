"""Questions about facts in numbered documents, answered by one of them (qa_1) or by two together (qa_2).

RULER asks questions of SQuAD and HotpotQA over their paragraphs. Here the documents are generated: lives of persons,
few of them with a birthplace, and towns with the wrong rivers.
"""

import random

from vllm_hybrid_sparse.load.ruler.haystacks import Filler
from vllm_hybrid_sparse.load.ruler.question import Question
from vllm_hybrid_sparse.load.ruler.words import NOUNS, PERSONS, RIVERS, TOWNS, TRADES, person

_INSTRUCTION = "Answer the question from the following documents."
_RIVALS = 3  # other persons whose birthplace is told, and other towns whose river is


def build_one_hop(rng: random.Random, filler: Filler, units: int, depth: float) -> Question:  # noqa: ARG001 - documents
    """In which town was somebody born? One of `units` + 1 documents says so, at `depth`."""
    people, towns = _people(rng, units + 1), rng.sample(TOWNS, 1 + _RIVALS)
    documents = _lives(rng, people, towns)
    return Question(
        _INSTRUCTION,
        _numbered(_with(documents[1:], [(depth, documents[0])])),
        f"What is the birthplace of {people[0]}?",
        f"The birthplace of {people[0]} is",
        (towns[0],),
        (documents[0],),
    )


def build_two_hops(rng: random.Random, filler: Filler, units: int, depth: float) -> Question:  # noqa: ARG001 - documents
    """On which river lies the town of somebody's birth? One document names the town, at `depth`, another its river."""
    people, towns, rivers = _people(rng, units + 1), rng.sample(TOWNS, 1 + _RIVALS), rng.sample(RIVERS, 1 + _RIVALS)
    lives = _lives(rng, people, towns)
    places = [_place(rng, town, river) for town, river in zip(towns, rivers, strict=True)]
    others = lives[1:] + places[1:]
    rng.shuffle(others)
    return Question(
        _INSTRUCTION,
        _numbered(_with(others, [(depth, lives[0]), (rng.random(), places[0])])),
        f"What is the birthplace of {people[0]}, and what is the river of that town?",
        f"The birthplace of {people[0]} is",
        (rivers[0],),
        (lives[0], places[0]),
    )


def _people(rng: random.Random, count: int) -> list[str]:
    """As many different persons; ValueError if there are not that many."""
    if count > PERSONS:
        raise ValueError(f"count={count}: there are {PERSONS} persons")
    people: dict[str, None] = {}
    while len(people) < count:
        people[person(rng)] = None
    return list(people)


def _lives(rng: random.Random, people: list[str], towns: list[str]) -> list[str]:
    """A document about each person; the first few are said to be born in the towns."""
    born = [f"The birthplace of {name} is {town}. " for name, town in zip(people, towns, strict=False)]
    return [
        f"{born[place] if place < len(born) else ''}{name} became a {rng.choice(TRADES)} after {rng.randrange(2, 20)} "
        f"years abroad and is known for a collection of every kind of {rng.choice(NOUNS)}."
        for place, name in enumerate(people)
    ]


def _place(rng: random.Random, town: str, river: str) -> str:
    return (
        f"The river of {town} is {river}. Its market sells every kind of {rng.choice(NOUNS)}, and "
        f"{rng.randrange(2, 90)} hundred people live there."
    )


def _with(documents: list[str], placed: list[tuple[float, str]]) -> list[str]:
    parts = list(documents)
    for depth, document in sorted(placed, reverse=True):
        parts.insert(round(depth * len(documents)), document)
    return parts


def _numbered(documents: list[str]) -> str:
    return "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(documents, start=1))
