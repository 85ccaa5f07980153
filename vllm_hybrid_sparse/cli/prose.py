"""Meaningless English of any length, from a small grammar: the text in which facts are hidden."""

import random
from collections.abc import Callable

_PEOPLE = (
    "the surveyor", "a retired captain", "the apothecary", "my cousin Agnes", "the stationmaster",
    "a visiting botanist", "old Mr. Harrow", "the night porter", "a weaver from the valley", "the schoolmistress",
    "the cartographer", "a boy with a red scarf", "the innkeeper", "Doctor Vance", "the bell-ringer",
    "a clerk from the mill",
)  # fmt: skip
_VERBS = (
    "measured", "painted", "argued about", "wrote home about", "walked twice around", "dreamed of", "swept out",
    "took notes on", "rebuilt", "told stories about", "sketched", "pointed towards", "kept returning to", "ignored",
)  # fmt: skip
_ADJECTIVES = (
    "crooked", "silent", "half-finished", "sunlit", "forgotten", "narrow", "whitewashed", "drowsy", "windswept",
    "ivy-covered", "freshly mown", "handsome", "flooded", "well-kept", "unlit", "remote",
)  # fmt: skip
_PLACES = (
    "orchard", "towpath", "courtyard", "granary", "observatory stairs", "quarry", "boathouse", "market hall",
    "vineyard", "signal box", "churchyard", "greenhouse", "tannery", "footbridge", "meadow", "lime kiln",
)  # fmt: skip
_THINGS = (
    "a brass lantern", "three loaves of rye bread", "an unsigned letter", "a basket of pears", "the wrong umbrella",
    "a folded map", "a jar of honey", "his second-best hat", "a coil of rope", "two library books", "a tin whistle",
    "the keys to the cellar", "a bundle of kindling", "a chipped blue teapot",
)  # fmt: skip
_TIMES = (
    "before breakfast", "on the first warm day of the year", "long after the shops had closed",
    "during the hay harvest", "at the turn of the tide", "while the kettle boiled", "one foggy morning",
    "in the week of the fair", "as the last coach left", "towards evening", "when nobody was watching",
    "after a night of heavy rain",
)  # fmt: skip
_REASONS = (
    "the river had risen again", "the road to the coast was being mended", "there was nothing else to do",
    "the swallows had come back early", "somebody had left the gate open", "the clock in the tower had stopped",
    "it was quieter there", "the frost had spoiled the beans", "the ferry was late", "a stranger had asked the way",
)  # fmt: skip

Choose = Callable[[tuple[str, ...]], str]


def _sentence(choose: Choose, form: int) -> str:
    place = f"the {choose(_ADJECTIVES)} {choose(_PLACES)}"
    person, verb = choose(_PEOPLE), choose(_VERBS)
    match form:
        case 0:
            text = f"{choose(_TIMES)}, {person} {verb} {place}."
        case 1:
            text = f"{person} {verb} {place} because {choose(_REASONS)}."
        case 2:
            text = f"{person} left {choose(_THINGS)} beside {place} and said nothing of it {choose(_TIMES)}."
        case 3:
            text = f"people who remembered {place} said that {person} once {verb} it, although {choose(_REASONS)}."
        case _:
            text = f"nobody could say why {person} carried {choose(_THINGS)} to {place} {choose(_TIMES)}."
    return text[0].upper() + text[1:]


def prose(sentences: int, seed: int) -> list[str]:
    """Return that many sentences, none of which holds a digit; the same for the same `seed`."""
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    return [_sentence(rng.choice, rng.randrange(5)) for _ in range(sentences)]
