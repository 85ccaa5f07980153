"""Questions about facts in numbered documents, answered by one of them (qa_1) or by two together (qa_2).

RULER asks questions of SQuAD and HotpotQA over their paragraphs; these are generated persons, towns and rivers.
"""

import random

from benchmarks.accuracy.ruler.haystacks import Filler
from benchmarks.accuracy.ruler.question import Question
from benchmarks.accuracy.ruler.words import NOUNS, TRADES, made_up_words, person

_INSTRUCTION = "Answer the question from the following documents. Give the answer only."


def build_one_hop(rng: random.Random, filler: Filler, units: int, depth: float) -> Question:  # noqa: ARG001 - documents
    """In which town was somebody born? One of `units` + 1 documents says so, at `depth`."""
    people = _people(rng, units + 1)
    town = made_up_words(rng, 1, 3)[0].capitalize()
    towns = [town, *_towns(rng, units, town)]
    documents = [_life(rng, name, place) for name, place in zip(people, towns, strict=True)]
    fact = documents[0]
    return Question(
        _INSTRUCTION,
        _numbered(_with(documents[1:], [(depth, fact)])),
        f"What is the birthplace of {people[0]}?",
        f"The birthplace of {people[0]} is",
        (town,),
        (fact,),
    )


def build_two_hops(rng: random.Random, filler: Filler, units: int, depth: float) -> Question:  # noqa: ARG001 - documents
    """On which river lies the town of somebody's birth? One document names the town, at `depth`, another its river."""
    people = _people(rng, units // 2 + 1)
    town, river = (word.capitalize() for word in made_up_words(rng, 2, 3))
    towns = [town, *_towns(rng, units // 2, town)]
    rivers = [river, *_towns(rng, units // 2, river)]
    lives = [_life(rng, name, place) for name, place in zip(people, towns, strict=True)]
    places = [_place(rng, name, stream) for name, stream in zip(towns, rivers, strict=True)]
    others = lives[1:] + places[1:]
    rng.shuffle(others)
    return Question(
        _INSTRUCTION,
        _numbered(_with(others, [(depth, lives[0]), (rng.random(), places[0])])),
        f"What is the river of the birthplace of {people[0]}?",
        f"The river of the birthplace of {people[0]} is",
        (river,),
        (lives[0], places[0]),
    )


def _people(rng: random.Random, count: int) -> list[str]:
    people: dict[str, None] = {}
    while len(people) < count:
        people[person(rng)] = None
    return list(people)


def _towns(rng: random.Random, count: int, other_than: str) -> list[str]:
    """Names none of which contains or is part of `other_than`; they may repeat."""
    towns: list[str] = []
    while len(towns) < count:
        town = made_up_words(rng, 1, 3)[0].capitalize()
        if town.lower() not in other_than.lower() and other_than.lower() not in town.lower():
            towns.append(town)
    return towns


def _life(rng: random.Random, name: str, town: str) -> str:
    thing = rng.choice(NOUNS)
    return (
        f"The birthplace of {name} is {town}. {name.split(maxsplit=1)[0]} became a {rng.choice(TRADES)} after "
        f"{rng.randrange(2, 20)} years abroad and is known for a collection of every kind of {thing}."
    )


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
