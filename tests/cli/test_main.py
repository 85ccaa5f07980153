"""The command line: what it refuses, and how."""

from pathlib import Path

import pytest

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
    ],
)
def test_bad_demo_option_is_refused_with_its_rule(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 1
    assert said in capsys.readouterr().err


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
        (ModuleNotFoundError("No module named 'gguf'", name="gguf"), "the package gguf is not installed; pip install"),
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
