"""The command line: what it refuses, and how."""

import json
from pathlib import Path

import pytest

from vllm_hybrid_sparse.cli import demo
from vllm_hybrid_sparse.cli import main as main_module
from vllm_hybrid_sparse.cli.main import main
from vllm_hybrid_sparse.cli.smollm2 import CACHE_VARIABLE


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text-tokens", "0"], "text-tokens=0: must be 1 to 7900"),
        (["--text-tokens", "7901"], "text-tokens=7901: must be 1 to 7900"),
        (["--settings", "{"], "settings={: must be JSON"),
        (["--settings", "[1]"], "settings=[1]: must be a JSON object"),
        (["--settings", f'{{"threshold": {"1" * 5000}}}'], f'settings={{"threshold": {"1" * 66}: must be JSON'),
        (["--settings", "[" * 100_000], f"settings={'[' * 80}: must be JSON"),
    ],
)
def test_bad_demo_option_is_refused_with_its_rule(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "on_cuda", "said"),
    [
        ('{"treshold": 0.9}', False, "hybrid_sparse.treshold=0.9: no such setting; did you mean threshold?"),
        ('{"treshold": 0.9}', True, "hybrid_sparse.treshold=0.9: no such setting; did you mean threshold?"),
        ('{"threshold": 2}', False, "hybrid_sparse.threshold=2: must be"),
        ('{"device_pool_pages": 64}', False, "hybrid_sparse.device_pool_pages=64: used by device emulated and cuda"),
        ('{"device": "cuda"}', False, "hybrid_sparse.device='cuda': needs vLLM's CUDA build and a GPU"),
        ('{"device": "none"}', True, "hybrid_sparse.device='none': must be cuda on vLLM's CUDA platform"),
    ],
)
def test_settings_that_the_demo_s_server_would_refuse_are_refused_before_it_begins(
    settings: str, on_cuda: bool, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "serves_on_cuda", lambda: on_cuda)
    monkeypatch.setattr(demo, "run_demo", lambda *_: pytest.fail("the demo began"))
    assert main(["demo", "--settings", settings]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hybrid-sparse: {said}")


@pytest.mark.parametrize(
    ("settings", "on_cuda"),
    [
        ({}, False),
        ({}, True),
        ({"policy": "topk", "topk_ratio": 0.05}, False),
        ({"device_pool_pages": 64}, True),
        ({"threshold": None}, False),
    ],
)
def test_settings_that_the_demo_s_server_takes_reach_it_as_given(
    settings: dict[str, object], on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, object]] = []
    monkeypatch.setattr(demo, "serves_on_cuda", lambda: on_cuda)
    monkeypatch.setattr(demo, "run_demo", lambda tokens, given: seen.append((tokens, given)) or 0)
    assert main(["demo", "--text-tokens", "9", "--settings", json.dumps(settings)]) == 0
    assert seen == [(9, settings)]


def test_model_prints_its_folder_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "SmolLM2-135M-Instruct"
    folder.mkdir()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert main(["model"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"


def test_no_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ModuleNotFoundError("No module named 'gguf'", name="gguf"),
            "the package gguf is not installed; pip install '.[bench,demo]' in",
        ),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_what_a_machine_lacks_is_said_in_a_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_say: object) -> Path:
        raise error

    monkeypatch.setattr(main_module, "model_dir", fails)
    assert main(["model"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hybrid-sparse: ")
    assert said in line
