"""Server-sent events, decoded from pieces of a stream."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hybrid_sparse.load import sse
from vllm_hybrid_sparse.load.sse import EventDecoder, StreamError

STREAM = ': ping\n\ndata: {"a": "ä€😀"}\n\nevent: x\ndata: one\r\ndata:two\r\n\r\n\n\ndata: [DONE]\n\n'.encode()
EVENTS = ['{"a": "ä€😀"}', "one\ntwo", "[DONE]"]


@given(cuts=st.lists(st.integers(0, len(STREAM))))
def test_events_do_not_depend_on_where_the_stream_is_cut(cuts: list[int]) -> None:
    decoder, events = EventDecoder(), []
    places = [0, *sorted(cuts), len(STREAM)]
    for begin, end in itertools.pairwise(places):
        events += decoder.feed(STREAM[begin:end])
    assert events == EVENTS
    assert not decoder.unfinished


def test_comments_and_names_of_other_events_are_of_no_error() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"event: errors\ndata: a\n\nevent: x\n: error\ndata: b\n\n") == ["a", "b"]
    with pytest.raises(StreamError, match=r"the server reports: an error$"):
        decoder.feed(b": ping\n\nevent: error\n\n")  # the comment is another event's


def test_an_event_is_unfinished_until_its_blank_line() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\n") == []
    assert decoder.unfinished
    assert decoder.feed(b"\n") == ["a"]
    assert not decoder.unfinished


def test_an_event_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(StreamError, match="not UTF-8"):
        EventDecoder().feed(b"data: \xff\n\n")


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "_MOST_BYTES", 100)
    decoder = EventDecoder()
    decoder.feed(b"data: " + b"x" * 90)
    with pytest.raises(StreamError, match="longer than 100 bytes"):
        decoder.feed(b"x" * 20)


def test_an_event_of_lines_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "_MOST_BYTES", 100)
    decoder = EventDecoder()
    decoder.feed(b"data: 1234567890\n" * 9)
    with pytest.raises(StreamError, match="longer than 100 bytes"):
        decoder.feed(b"data: 1234567890\n" * 2)
