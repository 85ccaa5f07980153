"""Recorded traces: what is written is read again, and what is wrong is named with its line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.traces import read_text, read_trace, write_trace

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
_PROMPTS = st.one_of(
    _TEXTS,
    st.lists(st.integers(0, 50_000), min_size=1).map(tuple),
    st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": _TEXTS}), min_size=1).map(tuple),
)
_REQUESTS = st.builds(
    Request,
    prompt=_PROMPTS,
    max_tokens=st.integers(1, 10_000),
    ignore_eos=st.booleans(),
    arrival_s=st.none() | st.floats(0, 1e6),
    group=st.none() | _TEXTS,
    source=st.none() | _TEXTS,
)


@given(requests=st.lists(_REQUESTS, min_size=1, max_size=4))
def test_a_written_trace_is_read_as_it_was(tmp_path_factory: pytest.TempPathFactory, requests: list[Request]) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.jsonl"
    write_trace(path, requests)
    assert read_trace(path) == requests


def test_blank_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('\n{"prompt": "a", "max_tokens": 1}\n\n{"prompt": ""}\n')
    with pytest.raises(ConfigError, match="line 4: max_tokens=None"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "must be JSON"),
        ("[]", "must be a JSON object"),
        pytest.param("1" * 5000, "must be JSON", id="a number of 5000 digits"),
        pytest.param("[" * 100_000, "must be JSON", id="a deep nesting"),
        ('{"max_tokens": 1}', "exactly one of prompt and messages"),
        ('{"prompt": "a", "messages": [], "max_tokens": 1}', "exactly one of prompt and messages"),
        ('{"prompt": "a"}', "max_tokens=None: must be a whole number"),
        ('{"prompt": "a", "max_tokens": 1.5}', "max_tokens=1.5: must be a whole number"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens=True: must be a whole number"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0: must be at least 1"),
        ('{"prompt": "", "max_tokens": 1}', "prompt: must not be empty"),
        ('{"prompt": [1, "b"], "max_tokens": 1}', "prompt: must be a text or a list of token ids"),
        ('{"prompt": [1, -1], "max_tokens": 1}', "prompt: must be a text or a list of token ids"),
        ('{"messages": ["a"], "max_tokens": 1}', "messages: must be a list of objects"),
        ('{"prompt": "a", "max_tokens": 1, "arrival_s": -1}', "arrival_s=-1: must be 0 or more"),
        ('{"prompt": "a", "max_tokens": 1, "arrival_s": "soon"}', "arrival_s=soon: must be a number"),
        (f'{{"prompt": "a", "max_tokens": 1, "arrival_s": 1{"0" * 400}}}', "must be 0 or more, finite"),
        ('{"prompt": "a", "max_tokens": 1, "ignore_eos": 1}', "ignore_eos=1: must be true or false"),
        ('{"prompt": "a", "max_tokens": 1, "group": 1}', "group=1: must be a text"),
        ('{"prompt": "a", "max_tokens": 1, "temperature": 1}', "temperature: unknown key"),
    ],
)
def test_a_wrong_line_is_named_with_its_number_and_rule(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 1}\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert f"trace={path}: line 2: " in str(caught.value)
    assert said in str(caught.value)


def test_a_file_that_is_missing_empty_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace=.*none.jsonl: must be a readable file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(ConfigError, match=r"documents=.*empty: must not be empty"):
        read_text("documents", tmp_path / "empty")
    (tmp_path / "latin").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ConfigError, match=r"documents=.*latin: must be UTF-8 \(byte 3 is not\)"):
        read_text("documents", tmp_path / "latin")


def test_a_salt_comes_first_in_texts_and_messages_and_is_refused_before_token_ids() -> None:
    assert Request(prompt="text", max_tokens=1).salted("salt ").prompt == "salt text"
    messages = ({"role": "system", "content": "text"}, {"role": "user", "content": "more"})
    assert Request(prompt=messages, max_tokens=1).salted("salt ").prompt == (
        {"role": "system", "content": "salt text"},
        {"role": "user", "content": "more"},
    )
    assert messages[0]["content"] == "text"
    parts = ({"role": "user", "content": [{"type": "text", "text": "text"}]},)
    salted = Request(prompt=parts, max_tokens=1).salted("salt ").prompt[0]
    assert isinstance(salted, dict)
    assert salted["content"] == [{"type": "text", "text": "salt "}, {"type": "text", "text": "text"}]
    empty = ({"role": "assistant", "content": None}, {"role": "user", "content": "text"})
    assert Request(prompt=empty, max_tokens=1).salted("salt ").prompt[0] == {"role": "assistant", "content": "salt "}
    with pytest.raises(ConfigError, match="salt=each-run"):
        Request(prompt=(1, 2), max_tokens=1).salted("salt ")
