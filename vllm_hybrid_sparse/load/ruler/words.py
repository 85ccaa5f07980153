"""Words that the tasks are made of: plain English ones, and made-up ones in any number."""

import random


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


NOUNS = _listed(
    """
    acorn anchor anvil apron atlas awning badge bagpipe balcony barrel basin beacon beetle bellows bench bonnet
    bramble bridle broom bucket buckle button cabin candle canoe canvas carpet castle cellar chapel cherry chimney
    cobbler compass copper cradle cricket crown cushion dagger dairy dolphin donkey drum eagle easel elbow ember engine
    falcon feather fiddle flagon flute fossil fountain garden garlic ginger glacier goblet granite gravel hammer
    hammock harbour harness hatchet hazel heron hinge honey hornet island ivory jacket jasmine jigsaw juniper kennel
    kettle ladder lantern lemon lettuce lobster locket magnet magpie mallet marble meadow mirror mitten monsoon mortar
    mustard napkin needle nettle nutmeg oatmeal onion orchid otter oyster paddle parcel parsley pebble pelican pencil
    pepper pigeon pillow piston planet plough pocket poplar pumpkin quarry quiver rabbit radish raven ribbon saddle
    salmon sandal satchel saucer shovel sickle spindle sparrow spinach squirrel stable statue sundial tablet tambourine
    teapot thimble thistle timber tinder tortoise trumpet tulip turnip umbrella valley velvet violin walnut wardrobe
    weasel whistle willow window
    """
)
ADJECTIVES = _listed(
    """
    amber ancient bitter blunt bold brisk bronze calm clever cloudy coarse crimson curly daring dusty eager faint
    fearless fragile frosty gentle gilded gloomy golden graceful grand hasty hidden hollow humble jolly lively lonely
    loyal mellow misty modest muddy nimble noble pale patient plain polite proud quiet rapid restless rusty scarlet
    shiny silent silver simple sleepy slender smooth solemn spotted steady stormy sturdy sudden tender thirsty
    tidy timid tiny velvety weary wooden yellow
    """
)
TRADES = _listed(
    "baker barber beekeeper bookbinder brewer carpenter clockmaker cook dentist farmer ferryman gardener glazier "
    "goldsmith hatter judge locksmith mason miller nurse painter pilot plumber potter printer saddler sailor shepherd "
    "tailor teacher weaver"
)
_FIRST_NAMES = _listed(
    "Ada Alma Anton Basil Bertha Boris Cecil Clara Conrad Cora Della Edgar Edith Elias Elsa Emil Erwin Esther Felix "
    "Flora Gerda Gideon Gilbert Greta Hazel Hector Helga Horace Hugo Ida Ingrid Iris Ivan Jasper Jonas Judith Karla "
    "Lambert Laura Leon Lydia Mabel Magnus Martha Matilda Milton Miriam Mona Nadia Nora Norman Olga Orson Oscar Otto "
    "Paula Petra Ralph Rosa Rufus Selma Silas Stella Theo Thelma Ulrich Ursula Vera Victor Walter Wanda Wilma"
)
_SURNAMES = _listed(
    "Abbott Adams Archer Bailey Barker Bennett Bishop Bradley Brooks Burton Carter Chapman Clarke Coleman Cooper "
    "Dawson Dixon Douglas Ellis Fisher Fletcher Foster Gibson Graham Grant Harper Hayes Holmes Howard Hughes "
    "Jackson Jenkins Knight Lambert Lawson Marshall Mason Mills Mitchell Morgan Murray Newton Owen Palmer Parker "
    "Pearson Porter Reed Reynolds Russell Saunders Shaw Simpson Spencer Stevens Sutton Turner Walsh Watson Webb "
    "Wells Wright"
)
TOWNS = _listed(
    "Antwerp Bergen Bilbao Bologna Bremen Bristol Calais Cardiff Cologne Cork Dover Dresden Exeter Florence Geneva "
    "Genoa Granada Hamburg Lisbon Madrid Malaga Naples Oslo Palermo Porto Prague Seville Turin Utrecht Venice "
    "Verona Vienna Warsaw Zurich"
)
RIVERS = _listed(
    "Amazon Avon Congo Danube Douro Ebro Ganges Jordan Loire Mersey Moselle Nile Oder Orinoco Plata Rhine Rhone "
    "Seine Severn Tagus Thames Tiber Tyne Volga Yukon Zambezi"
)
PERSONS = len(_FIRST_NAMES) * len(_SURNAMES)  # that `person` can return
_ONSETS = ("b", "br", "d", "dr", "f", "g", "gl", "h", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou")
_CODAS = ("", "l", "m", "n", "r", "s", "th", "nd", "rk", "lt")


def made_up_word(rng: random.Random, syllables: int = 2) -> str:
    """A word that no dictionary has, most likely."""
    middle = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables - 1))
    return middle + rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)


def made_up_words(rng: random.Random, count: int, syllables: int = 2) -> list[str]:
    """`count` different made-up words, none of which is part of another."""
    words: list[str] = []
    while len(words) < count:
        word = made_up_word(rng, syllables)
        if not any(word in other or other in word for other in words):
            words.append(word)
    return words


def person(rng: random.Random) -> str:
    """Return a first name and a surname, one of `PERSONS`."""
    return f"{rng.choice(_FIRST_NAMES)} {rng.choice(_SURNAMES)}"


def described_things(rng: random.Random, count: int) -> list[str]:
    """`count` different "adjective noun" pairs; ValueError if there are not that many."""
    pairs = len(ADJECTIVES) * len(NOUNS)
    if count > pairs:
        raise ValueError(f"count={count}: there are {pairs} pairs of adjective and noun")
    chosen = rng.sample(range(pairs), count)
    return [f"{ADJECTIVES[number % len(ADJECTIVES)]} {NOUNS[number // len(ADJECTIVES)]}" for number in chosen]
