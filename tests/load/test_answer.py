"""What is read from a streamed answer: when tokens came, how many, and whether it came to its end."""

from typing import Any

import pytest

from tests.load.fake_server import DONE, event, token
from vllm_hybrid_sparse.load.answer import Answer, Counted
from vllm_hybrid_sparse.load.sse import StreamError


def read(*pieces: bytes) -> Answer:
    """Feed pieces that come a second apart."""
    answer = Answer()
    for now_s, piece in enumerate(pieces, start=1):
        answer.feed(piece, float(now_s))
    answer.finish()
    return answer


def usage(tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": 7, "completion_tokens": tokens, **more}


def total(tokens: int) -> bytes:
    return event({"choices": [], "usage": usage(tokens)})


def chat(delta: dict[str, Any], finish: str | None = None, used: int | None = None) -> bytes:
    chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return event(chunk if used is None else chunk | {"usage": usage(used)})


def test_tokens_that_came_together_are_counted_by_the_usage_of_each_chunk() -> None:
    answer = read(token("a", usage=usage(1)), token("bcd", usage=usage(4)), token("", "stop", usage(5)), DONE)
    assert answer.arrivals == [(1.0, 1), (2.0, 3), (3.0, 1)]
    assert (answer.tokens, answer.counted, answer.prompt_tokens) == (5, Counted.EACH_CHUNK, 7)
    assert (answer.text, answer.finish_reason) == ("abcd", "stop")


def test_a_chunk_without_a_new_token_is_no_arrival() -> None:
    answer = read(token("", usage=usage(0)), token("a", usage=usage(1)), token("", "stop", usage(1)), DONE)
    assert answer.arrivals == [(2.0, 1)]


def test_usage_at_the_end_corrects_the_number_and_not_the_times() -> None:
    answer = read(token("a"), token("b c d"), token("e", "length"), total(5), DONE)
    assert [at_s for at_s, _ in answer.arrivals] == [1.0, 2.0, 3.0]
    assert (answer.tokens, answer.counted) == (5, Counted.TOTAL)


def test_usage_that_comes_with_the_last_chunk_alone_is_a_total() -> None:
    answer = read(token("a"), token("b"), token("", "length", usage(2)), DONE)
    assert answer.arrivals == [(1.0, 1), (2.0, 1)]
    assert (answer.tokens, answer.counted) == (2, Counted.TOTAL)


def test_without_usage_chunks_are_counted_and_said_to_be() -> None:
    answer = read(token("a"), token("b"), token("", "stop"), DONE)
    assert (answer.tokens, answer.counted) == (2, Counted.CHUNKS)


def test_empty_text_inside_an_answer_is_a_token_held_back() -> None:
    assert len(read(token("a"), token(""), token("é", "length"), DONE).arrivals) == 3


def test_token_ids_count_where_the_server_lists_them() -> None:
    chunk = event({"choices": [{"index": 0, "text": "ab", "token_ids": [4, 5], "finish_reason": "length"}]})
    assert read(chunk, DONE).arrivals == [(1.0, 2)]


def test_cached_tokens_are_taken_from_the_details() -> None:
    details = usage(1, prompt_tokens_details={"cached_tokens": 6})
    assert read(token("a", "length"), event({"choices": [], "usage": details}), DONE).cached_tokens == 6


@pytest.mark.parametrize("used", [None, 0])
def test_the_chunk_that_opens_a_chat_is_no_token(used: int | None) -> None:
    opening = chat({"role": "assistant", "content": ""}, used=used)
    rest = [chat({"content": "a"}, used=used and 1), chat({}, "stop", used=used and 1)]
    if used is not None:
        rest = [chat({"content": "a"}, used=1), chat({}, "stop", used=1)]
    assert read(opening, *rest, DONE).arrivals == [(2.0, 1)]


def test_reasoning_and_tool_calls_are_tokens() -> None:
    pieces = chat({"reasoning_content": "hm"}), chat({"tool_calls": [{"index": 0}]}), chat({"content": "a"}, "stop")
    assert len(read(*pieces, DONE).arrivals) == 3


def test_a_role_in_every_chunk_hides_no_token() -> None:
    pieces = chat({"role": "assistant", "content": "a"}), chat({"role": "assistant", "content": "b"}, "stop")
    assert len(read(*pieces, DONE).arrivals) == 2


def test_an_answer_that_is_the_closing_token_alone_has_come() -> None:
    answer = read(token("", "stop"), total(1), DONE)
    assert (answer.arrivals, answer.tokens) == ([(1.0, 1)], 1)


def test_a_finish_reason_without_done_is_an_end() -> None:
    assert read(token("a", "stop")).finish_reason == "stop"


@pytest.mark.parametrize("rest", [b"data: [DONE]\n", b"data: [DONE]\r\n", b"data: [DONE]", b": bye", b"data: {"])
def test_what_is_cut_off_behind_the_finish_reason_makes_no_whole_answer_a_failed_one(rest: bytes) -> None:
    assert read(token("a", "stop"), rest).tokens == 1


def test_done_needs_no_blank_line() -> None:
    assert read(token("a"), b"data: [DONE]\n").tokens == 1


def test_the_chunk_that_closes_a_chat_may_hold_null() -> None:
    closing = event({"choices": [{"index": 0, "delta": None, "finish_reason": "stop"}]})
    answer = read(chat({"content": "a"}), closing, DONE)
    assert (answer.finish_reason, answer.tokens) == ("stop", 1)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([], "ended before"),
        ([token("a")], r"ended before \[DONE\] and without a finish reason"),
        ([token("a"), b"data: {"], "ended inside an event"),
        ([DONE], "ended without a token"),
        ([b"data: {\n\n"], "not JSON"),
        ([b"data: " + b"[" * 100_000 + b"]" * 100_000 + b"\n\n"], "not JSON"),  # deeper than Python's parser goes
        ([b'data: {"id": ' + b"1" * 5000 + b"}\n\n"], "not JSON"),  # more digits than Python makes a number of
        ([b"data: 3\n\n"], "not an object"),
        ([event({"choices": "a"})], "choices is not a list"),
        ([event({"choices": [{"delta": "a"}]})], "delta is not an object"),
        ([token("a"), event({"error": {"message": "engine died", "code": 500}})], "the server reports: engine died"),
        ([event({"error": "engine died"})], "the server reports: engine died"),
        ([token("a"), event({"object": "error", "message": "engine died"}), DONE], "the server reports: engine died"),
        ([token("a"), b'event: error\ndata: {"code": 500, "message": "no memory"}\n\n', DONE], "reports: no memory"),
        ([token("a"), b"event:error\r\n: no worker is left\r\n\r\n", DONE], "reports: no worker is left"),
        ([token("a"), b"data: gone\nevent: error\n\n", token("", "stop")], "reports: gone"),
        ([token("a"), b"event: error\n\n", DONE], "reports: an error"),
    ],
)
def test_a_stream_that_makes_no_sense_or_breaks_off_is_an_error(pieces: list[bytes], said: str) -> None:
    with pytest.raises(StreamError, match=said):
        read(*pieces)


def test_a_usage_of_zeros_beside_text_is_no_count() -> None:
    zeros = usage(0)
    answer = read(token("a", usage=zeros), token("b", usage=zeros), token("c", "stop", zeros), total(3), DONE)
    assert answer.arrivals == [(1.0, 1), (2.0, 1), (3.0, 1)]
    assert (answer.tokens, answer.counted) == (3, Counted.TOTAL)
    never = read(token("a", usage=zeros), token("b", "stop", zeros), DONE)
    assert (len(never.arrivals), never.tokens, never.counted) == (2, 2, Counted.CHUNKS)


@pytest.mark.parametrize("used", [[1, 1, 1, 1], [2, 1, 2, 1], [1, 1, 2, 2]])
def test_a_usage_of_each_chunk_by_itself_is_no_count_of_those_so_far(used: list[int]) -> None:
    chunks = [token("a", usage=usage(tokens)) for tokens in used]
    answer = read(*chunks, token("", "stop"), total(sum(used)), DONE)
    assert answer.arrivals == [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)]
    assert (answer.tokens, answer.counted) == (sum(used), Counted.TOTAL)


def test_text_that_comes_after_its_tokens_were_counted_is_no_arrival() -> None:
    answer = read(token("a", usage=usage(2)), token("b", usage=usage(2)), token("c", "stop", usage(3)), DONE)
    assert answer.arrivals == [(1.0, 2), (3.0, 1)]
    assert answer.counted is Counted.EACH_CHUNK


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_server_broke_off_is_no_answer(reason: str) -> None:
    with pytest.raises(StreamError, match=f"broke the answer off .finish reason {reason}"):
        read(token("a"), token("", reason), DONE)


def test_a_usage_that_opens_an_answer_and_does_not_grow_is_not_taken_for_one_of_each_chunk() -> None:
    opening = {"prompt_tokens": 7, "completion_tokens": 1}
    answer = read(token("a", usage=opening), token("b"), token("c", "stop"), DONE)
    assert (answer.tokens, len(answer.arrivals), answer.counted) == (3, 3, Counted.CHUNKS)
    told = read(
        token("a", usage=opening), token("b"), token("", "stop", usage=opening | {"completion_tokens": 5}), DONE
    )
    assert (told.tokens, told.counted) == (5, Counted.TOTAL)
    assert len(told.arrivals) == 2


def test_halves_of_a_character_are_put_together_and_a_lone_one_replaced() -> None:
    whole = read(token("a\ud83d"), token("\ude00b", "stop"), DONE).text
    assert whole == "a\U0001f600b"
    lone = read(token("a\ud83d"), token("b", "stop"), DONE).text
    assert lone.encode()
    assert (lone[0], lone[-1], len(lone)) == ("a", "b", 3)
