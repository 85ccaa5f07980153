"""Requests that are wrong on purpose are as wrong as they say, and repeatable."""

import json
import random

from benchmarks.soak.wrong_requests import REFUSED, good_body, random_request, wrong_requests

WRONG = wrong_requests("m", 64)


def test_every_mistake_has_a_name_of_its_own_and_statuses() -> None:
    assert len({wrong.name for wrong in WRONG}) == len(WRONG)
    assert all(wrong.right for wrong in WRONG)
    assert not any(status >= 500 for wrong in WRONG for status in wrong.right)


def test_a_request_without_the_mistake_would_be_answered() -> None:
    """Each body differs from the good one, so it is refused for its mistake."""
    bodies = [wrong.body for wrong in WRONG if wrong.right == REFUSED and wrong.body.startswith(b'{"model": "m"')]
    assert len(bodies) > 20
    assert json.dumps(good_body("m")).encode() not in bodies


def test_the_long_prompt_is_just_too_long() -> None:
    (body,) = [json.loads(wrong.body) for wrong in WRONG if wrong.name == "prompt too long"]
    assert len(body["prompt"]) == 65


def test_random_requests_are_repeatable_mostly_json_and_ask_for_little() -> None:
    bodies = [random_request("m", random.Random(seed)) for seed in range(300)]
    assert bodies == [random_request("m", random.Random(seed)) for seed in range(300)]
    assert len(set(bodies)) > 250
    read = []
    for body in bodies:
        try:
            read.append(json.loads(body))
        except ValueError:  # broken on purpose
            continue
    assert 200 < len(read) < 300
    tokens = [body.get("max_tokens", 0) for body in read]
    assert not any(count > 32 for count in tokens if isinstance(count, int | float))  # NaN > 32 is false
