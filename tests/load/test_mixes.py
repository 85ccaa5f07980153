"""Traces made up from documents and prose."""

import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hybrid_sparse.cli.bench import write_prose
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.mixes import (
    Lengths,
    cut_to_words,
    document_mix,
    first_of_groups,
    mixed,
    prose_mix,
    salt_for,
)
from vllm_hybrid_sparse.load.requests import Request

ONE = Lengths((8,), (1.0,))
DOCUMENTS = {"a": "alpha text", "b": "beta text", "c": "gamma text"}


def test_requests_of_a_document_begin_with_its_text_and_ask_different_things() -> None:
    requests = document_mix(DOCUMENTS, ["who?", "why?"], 5, ONE, 0)
    assert Counter(request.group for request in requests) == {"a": 5, "b": 5, "c": 5}
    for request in requests:
        assert request.prompt.startswith(DOCUMENTS[request.group])
    assert len({request.prompt for request in requests}) == len(requests)


def test_the_order_is_drawn_and_depends_on_the_seed_alone() -> None:
    first = document_mix(DOCUMENTS, ["who?"], 6, ONE, 3)
    assert first == document_mix(DOCUMENTS, ["who?"], 6, ONE, 3)
    assert first != document_mix(DOCUMENTS, ["who?"], 6, ONE, 4)
    groups = [request.group for request in first]
    assert groups != sorted(groups)


def test_no_question_or_no_document_is_refused() -> None:
    for documents, questions, each in ((DOCUMENTS, ["q"], 0), ({}, ["q"], 1), (DOCUMENTS, [], 1)):
        with pytest.raises(ConfigError):
            document_mix(documents, questions, each, ONE, 0)


def test_prose_has_the_lengths_asked_for_and_no_common_beginning() -> None:
    lengths = Lengths((20, 200), (1.0, 1.0))
    requests = prose_mix(write_prose, lengths, ONE, 40, 0.5, 1)
    words = Counter(len(request.prompt.split()) for request in requests)
    assert set(words) == {10, 100}
    assert len({request.prompt[:40] for request in requests}) == 40
    assert requests == prose_mix(write_prose, lengths, ONE, 40, 0.5, 1)


def test_weights_say_how_often_a_length_is_drawn() -> None:
    lengths, rng = Lengths.parse("prose", "10:3,20:1"), random.Random(0)
    drawn = Counter(lengths.draw(rng) for _ in range(8000))
    assert drawn[10] / 8000 == pytest.approx(0.75, abs=0.02)
    assert set(drawn) == {10, 20}


@pytest.mark.parametrize("text", ["", "a", "10:b", "0", "10:0", "10,-1", "10:inf", "10:nan"])
def test_lengths_that_are_none_are_refused_by_option_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^prose={text}: "):
        Lengths.parse("prose", text)


@given(text=st.text(alphabet=" \n\tab", max_size=40), words=st.integers(0, 12))
def test_a_cut_text_has_the_first_words_as_they_stood(text: str, words: int) -> None:
    cut = cut_to_words(text, words)
    assert text.startswith(cut)
    assert cut.split() == text.split()[:words]


def test_a_weight_left_out_is_one() -> None:
    assert Lengths.parse("prose", "10,20:2") == Lengths((10, 20), (1.0, 2.0))


def test_mixing_keeps_every_request_and_each_trace_s_order() -> None:
    traces = [[Request(prompt=f"{name}{n}", max_tokens=1) for n in range(9)] for name in "xy"]
    together = mixed(traces, 5)
    for name, trace in zip("xy", traces, strict=True):
        assert [request for request in together if request.prompt.startswith(name)] == trace
    assert len(together) == 18
    assert together not in (traces[0] + traces[1], traces[1] + traces[0])


def test_the_first_request_of_each_group_stands_for_it() -> None:
    requests = document_mix(DOCUMENTS, ["who?"], 4, ONE, 0)
    firsts = first_of_groups([Request(prompt="of no group", max_tokens=1), *requests])
    assert len(firsts) == 3
    for first in firsts:
        assert first is next(request for request in requests if request.group == first.group)


def test_first_lines_differ_by_run_server_and_salt() -> None:
    names = [
        ("a", "x", "round 1"),
        ("a x", "", "round 1"),
        *((s, side, run) for s in "ab" for side in "xy" for run in "12"),
    ]
    salts = {salt_for(*name) for name in names}
    assert len(salts) == len(names)
    assert salt_for("a", "x", "round 1") in salts


def test_first_lines_are_of_as_many_digits() -> None:
    for number in range(50):
        assert re.fullmatch(r"Run \d{12}\.\n\n", salt_for("a", "x", f"round {number}"))
