"""What a server says about itself, as a report keeps it."""

import json

import pytest

from vllm_hybrid_sparse.load.server_text import error_in_body, reported_error, shortened


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "too\n  long", "type": "BadRequestError", "code": 400}}, "too long"),
        ({"error": "too long"}, "too long"),
        ({"error": {"code": 7}}, '{"code": 7}'),
        ({"object": "error", "message": "too long", "code": 400}, "too long"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"detail": [{"loc": ["body", "n"], "msg": "wrong"}]}, '[{"loc": ["body", "n"], "msg": "wrong"}]'),
        ({"error": None, "detail": "no"}, "no"),
        ({"error": {"message": "half \ud83d"}}, "half \ufffd"),
        ({"error": {"message": "x" * 400}}, "x" * 300),
        ({"error": "", "detail": []}, None),
        ({"choices": []}, None),
        ([], None),
        ("text", None),
    ],
)
def test_the_message_of_an_error_is_found_where_servers_put_it(body: object, said: str | None) -> None:
    assert error_in_body(json.dumps(body)) == said


@pytest.mark.parametrize("body", ["", "<html>", "{", "[" * 100_000])
def test_what_is_no_json_has_no_message(body: str) -> None:
    assert error_in_body(body) is None


def test_an_event_of_a_stream_reports_an_error_by_its_own_keys_alone() -> None:
    assert reported_error({"error": {"message": "died"}}) == reported_error({"error": "died"}) == "died"
    assert reported_error({"object": "error", "message": "died"}) == "died"
    assert reported_error({"message": "hello", "detail": "hello", "choices": []}) is None


def test_text_is_cut_on_one_line() -> None:
    assert shortened(" a\n b\tc ") == "a b c"
    assert len(shortened("x" * 1000)) == 300
