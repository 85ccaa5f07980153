"""`hybrid-sparse calibrate` on a tiny model: what it writes, that it resumes where it was stopped, what it refuses."""

import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
)

from vllm_hybrid_sparse.cli import calibrate as calibrate_module
from vllm_hybrid_sparse.cli import collect as collect_module
from vllm_hybrid_sparse.cli.calibrate import CalibrationOptions
from vllm_hybrid_sparse.cli.calibration_texts import file_windows, prose_window
from vllm_hybrid_sparse.cli.collect import SamplingPlan, collect_window
from vllm_hybrid_sparse.cli.main import main
from vllm_hybrid_sparse.cli.model_digest import model_digest
from vllm_hybrid_sparse.cli.prose import prose
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.hf import DecodeStep, SparseSession
from vllm_hybrid_sparse.hf.shape import model_shape
from vllm_hybrid_sparse.kernels.key_codes.reference import encode_keys, estimate_weights
from vllm_hybrid_sparse.predictor.labels import label_heads
from vllm_hybrid_sparse.predictor.model import ModelShape, load_predictor
from vllm_hybrid_sparse.predictor.samples import Samples
from vllm_hybrid_sparse.values import PageRanking, RetainedSet

SHAPE = ModelShape(layers=2, query_heads=6, kv_heads=2, head_dim=16)
TOKENS, SEGMENT, SPAN, STEPS = 900, 400, 32, 3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with one token a byte."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "stories.txt"
    path.write_text(" ".join(prose(80, seed=1)), encoding="utf-8")
    return path


def arguments(model: Path, text: Path, out: Path, *more: str) -> list[str]:
    sizes = ["--tokens", str(TOKENS), "--segment-tokens", str(SEGMENT), "--span-tokens", str(SPAN)]
    counts = ["--steps", str(STEPS), "--windows", "3", "--prose-windows", "1", "--epochs", "2", "--tau", "0.02"]
    return ["calibrate", str(model), "--texts", str(text), "--out", str(out), *sizes, *counts, *more]


def test_a_predictor_is_written_for_the_model_with_its_command_and_no_paths(
    model_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tiny.safetensors"
    assert main(arguments(model_folder, text, out)) == 0
    _, origin = load_predictor(out, SHAPE, RetainedSet(), PageRanking())
    assert origin.command == (
        "hybrid-sparse calibrate tiny --texts stories.txt --summary key_codes --code-bits 2 --unread-attributed "
        "0.5 --out tiny.safetensors --tokens 900 --windows 3 --prose-windows 1 --skip-tokens 0 --segment-tokens "
        "400 --span-tokens 32 --sink-tokens 64 --window-tokens 256 --steps 3 --tau 0.02 --epochs 2 --quantile 0.9 "
        "--seed 0"
    )
    assert origin.unread_attributed == 0.5
    said = capsys.readouterr().out
    assert "window 4 of 4 (prose 0)" in said
    assert re.search(r"^reached +0\.\d+$", said, re.MULTILINE)
    assert str(tmp_path).encode() not in out.read_bytes()
    shards = sorted((tmp_path / "tiny.safetensors.work").glob("window-*.npz"))
    assert len(shards) == 4
    samples = Samples.load(shards[0])
    assert samples.features.shape == (2 * STEPS, 2, 6, 41)
    assert np.isfinite(samples.features).all()
    assert 0 < (samples.budgets[..., 0] == 0).mean() < 1


def test_a_stopped_calibration_goes_on_and_ends_in_the_same_predictor(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, resumed = tmp_path / "whole" / "p.safetensors", tmp_path / "resumed" / "p.safetensors"
    for out in (whole, resumed):
        out.parent.mkdir()
    assert main(arguments(model_folder, text, whole)) == 0
    collected: list[str] = []

    def stopping(model: object, token_ids: object, *rest: object) -> Samples:
        if len(collected) == 2:
            raise KeyboardInterrupt
        collected.append(str(rest[-1]))
        return collect_window(model, token_ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(calibrate_module, "collect_window", stopping)
    with pytest.raises(KeyboardInterrupt):
        main(arguments(model_folder, text, resumed))
    assert not resumed.exists()
    work = resumed.with_name("p.safetensors.work")
    assert sorted(path.name for path in work.glob("*.npz")) == ["window-0000.npz", "window-0001.npz"]
    (work / ".window-0002.npz.partial").write_bytes(b"half a shard")  # what a kill in the middle of a write leaves

    seeds: list[str] = []

    def counting(model: object, token_ids: object, *rest: object) -> Samples:
        seeds.append(str(rest[-1]))
        return collect_window(model, token_ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(calibrate_module, "collect_window", counting)
    assert main(arguments(model_folder, text, resumed)) == 0
    assert seeds == ["0 2", "0 3"]
    assert resumed.read_bytes() == whole.read_bytes()


def test_work_of_another_calibration_is_refused(
    model_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.safetensors"
    assert main(arguments(model_folder, text, out)) == 0
    before = out.read_bytes()
    for option, value, name in (
        ("--tau", "0.05", "tau"),
        ("--steps", "4", "steps"),
        ("--skip-tokens", "9", "windows"),
        ("--unread-attributed", "0", "unread_attributed"),
    ):
        assert main(arguments(model_folder, text, out, option, value)) == 1
        assert f"holds samples of another {name}; name another folder or delete it" in capsys.readouterr().err
    other = tmp_path / model_folder.name
    shutil.copytree(model_folder, other)
    assert model_digest(str(other)) == model_digest(str(model_folder))
    (weights,) = other.glob("*.safetensors")
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert main(arguments(other, text, out)) == 1
    assert "holds samples of another model_digest; name another folder or delete it" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert main(arguments(model_folder, text, out, "--epochs", "1")) == 0  # training alone may differ
    assert out.read_bytes() != before


def test_samples_are_not_taken_for_those_of_other_windows(
    model_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused if texts come in another order, or if nothing says what the samples are of."""
    other, out = text.with_name("other.txt"), tmp_path / "p.safetensors"
    other.write_text(text.read_text(encoding="utf-8")[50:], encoding="utf-8")
    both = ("--texts", str(text), str(other))
    assert main(arguments(model_folder, text, out, *both)) == 0
    assert main(arguments(model_folder, text, out, "--texts", str(other), str(text))) == 1
    assert "holds samples of another windows" in capsys.readouterr().err
    manifest = out.with_name("p.safetensors.work") / "manifest.json"
    for left in ("", "["):
        manifest.write_text(left, encoding="utf-8")
        assert main(arguments(model_folder, text, out, *both)) == 1
        assert "nothing says what they are of; name another folder or delete it" in capsys.readouterr().err
    manifest.unlink()
    assert main(arguments(model_folder, text, out, *both)) == 1
    assert "nothing says what they are of" in capsys.readouterr().err


def test_bad_input_is_refused_with_its_rule(
    model_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, missing = tmp_path / "p.safetensors", tmp_path / "missing"
    binary, short, empty = tmp_path / "binary.txt", tmp_path / "short.txt", tmp_path / "empty.txt"
    binary.write_bytes(b"\xff\xfe\xfa" * 999)
    empty.write_text("\n")
    short.write_text("Too short.")
    taken = tmp_path / "taken"
    taken.write_text("a file where the work folder should be")
    windowed = tmp_path / "windowed"
    MistralConfig(num_hidden_layers=2, sliding_window=64).save_pretrained(windowed)
    for given, said in (
        (arguments(missing, text, out), f"model={missing}: must be the folder or the name of a Transformers"),
        (arguments(windowed, text, out), f"model={windowed}: 2 of its layers have a sliding window"),
        (arguments(model_folder, missing, out), f"texts={missing}: no such file"),
        (arguments(model_folder, binary, out), f"texts={binary}: must be UTF-8 (byte 0 is not)"),
        (arguments(model_folder, empty, out), f"texts={empty}: must not be empty"),
        (arguments(model_folder, short, out), f"texts={short}: has 10 tokens, must have 900 after the first 0"),
        (arguments(model_folder, text, missing / "p"), f"out={missing / 'p'}: must be a file in a folder that exists"),
        (arguments(model_folder, text, tmp_path), f"out={tmp_path}: must be a file in a folder that exists"),
        (arguments(model_folder, text, out, "--work", str(taken)), f"work={taken}: must be a folder"),
        (arguments(model_folder, text, out, "--tokens", "1025"), "tokens=1025: must be at most 1024"),
        (arguments(model_folder, text, out, "--tokens", "399"), "tokens=399: must be segment-tokens=400 or more"),
        (arguments(model_folder, text, out, "--segment-tokens", "367"), "segment-tokens=367: must be 368 or more"),
        (arguments(model_folder, text, out, "--steps", "33"), "steps=33: must be 1 to span-tokens=32"),
        (arguments(model_folder, text, out, "--windows", "0"), "windows=0: must be 1 or more"),
        (arguments(model_folder, text, out, "--prose-windows", "-1"), "prose-windows=-1: must be 0 or more"),
        (arguments(model_folder, text, out, "--skip-tokens", "-1"), "skip-tokens=-1: must be 0 or more"),
        (arguments(model_folder, text, out, "--tau", "0"), "tau=0.0: must be above 0"),
        (arguments(model_folder, text, out, "--unread-attributed", "1.1"), "unread-attributed=1.1: must be 0 to 1"),
        (arguments(model_folder, text, out, "--quantile", "1"), "quantile=1.0: must be above 0 and below 1"),
        (arguments(model_folder, text, out, "--windows", "1", "--prose-windows", "0"), "prompts=1: must be 2 or more"),
    ):
        assert main(given) == 1
        assert said in capsys.readouterr().err
    assert not out.exists()
    assert not (tmp_path / "p.safetensors.work").exists()


def test_what_is_not_given_is_as_the_options_have_it(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line repeats their defaults, since it must not import torch for its help."""
    seen: list[CalibrationOptions] = []
    monkeypatch.setattr(calibrate_module, "calibrate", lambda options: seen.append(options) or {})
    out = tmp_path / "p.safetensors"
    assert main(["calibrate", "a-model", "--texts", str(text), "--out", str(out)]) == 0
    assert seen == [CalibrationOptions(model="a-model", texts=(text,), out=out)]


@pytest.mark.parametrize("ranking", [PageRanking(), PageRanking(summary="minmax", code_bits=None)])
def test_samples_are_those_of_token_by_token_decoding(model_folder: Path, ranking: PageRanking) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    token_ids = prose_window(AutoTokenizer.from_pretrained(model_folder), 0, SEGMENT, SEGMENT, SPAN, 0).token_ids
    plan = SamplingPlan(segment_tokens=SEGMENT, span_tokens=SPAN, steps=SPAN)  # every step of the span
    attributed = 0.5 if ranking.code_bits else 0.0
    samples = collect_window(model, token_ids, plan, RetainedSet(), ranking, 0.02, attributed, "seed")
    seen: list[DecodeStep] = []
    with (
        torch.inference_mode(),
        SparseSession(model, HybridSparseConfig(policy="dense"), max_tokens=SEGMENT, watch=seen.append),
    ):
        cache = DynamicCache()
        model(token_ids[None, : SEGMENT - SPAN], past_key_values=cache)
        for position in range(SEGMENT - SPAN, SEGMENT):
            model(token_ids[None, position : position + 1], past_key_values=cache)
    assert len(seen) == SPAN * SHAPE.layers
    assert samples.host_tokens.tolist() == [(step.keys.shape[1] - 320) // 16 * 16 for step in seen[:: SHAPE.layers]]
    for index, step in enumerate(seen):
        weights = page_weights(step) if ranking.code_bits else None
        labels = label_heads(step.query, step.keys, step.values, step.scale, RetainedSet(), 0.02, weights, attributed)
        got = samples.budgets[index // SHAPE.layers, step.layer]
        assert (np.abs(got - labels.budgets.numpy()) < 1e-6).mean() > 0.9  # rounding may decide between two equal ones


def test_blocks_are_ranked_by_codes_of_whole_keys(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Fluxion's split codes rank when serving, and whatever a device ranks."""
    asked: list[bool] = []

    class Watched(SparseSession):
        def __init__(self, *args: Any, common_keys: bool, **options: Any) -> None:
            asked.append(common_keys)
            super().__init__(*args, common_keys=common_keys, **options)

    monkeypatch.setattr(collect_module, "SparseSession", Watched)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    token_ids = prose_window(AutoTokenizer.from_pretrained(model_folder), 0, SEGMENT, SEGMENT, SPAN, 0).token_ids
    plan = SamplingPlan(segment_tokens=SEGMENT, span_tokens=SPAN, steps=1)
    collect_window(model, token_ids, plan, RetainedSet(), PageRanking(), 0.02, 0.5, "seed")
    assert asked == [False]


def page_weights(step: DecodeStep) -> torch.Tensor:
    """The reference's estimates from key codes for the candidates of a step: [q_heads, pages]."""
    first, end = RetainedSet().candidate_range(step.keys.shape[1])
    host, groups = step.keys[:, 16 * first : 16 * end], step.query.unflatten(0, (len(step.keys), -1))
    weights = [
        estimate_weights(rows, encode_keys(keys, 2), step.scale) for rows, keys in zip(groups, host, strict=True)
    ]
    return torch.cat(weights).float()


def test_anchors_come_before_their_samples_and_segments_in_order() -> None:
    plan = SamplingPlan(segment_tokens=100, span_tokens=20, steps=5)
    positions = plan.positions(350, random.Random(0))
    assert [anchor for anchor, _ in positions] == [79, 179, 279]
    for anchor, samples in positions:
        assert len(set(samples)) == 5
        assert samples == sorted(samples)
        assert all(anchor < sample <= anchor + 20 for sample in samples)


def test_windows_of_a_text_are_disjoint_and_leave_out_what_is_skipped(model_folder: Path, text: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    whole = torch.tensor(tokenizer(text.read_text())["input_ids"])
    windows = file_windows(tokenizer, text, 500, 3, skip_tokens=1000)
    assert [window.name for window in windows] == ["stories.txt 0", "stories.txt 1", "stories.txt 2"]
    available = (len(whole) - 1000) // 500
    starts = [1000 + index * available // 3 * 500 for index in range(3)]
    for window, start in zip(windows, starts, strict=True):
        assert torch.equal(window.token_ids, whole[start : start + 500])
    assert starts[0] == 1000
    assert starts[1] - starts[0] >= 500
    assert starts[2] - starts[1] >= 500


def test_prose_windows_ask_for_facts_that_were_told_before(model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    window = prose_window(tokenizer, 0, 6200, 3000, 600, seed=0)
    assert len(window.token_ids) == 6200
    text = tokenizer.decode(window.token_ids)
    told: dict[str, str] = {}
    asked = 0
    for segment in (text[:3000], text[3000:6000]):
        told |= dict(re.findall(r"The secret number of the ([a-z ]+) is (\d{5})\.", segment[:2400]))
        answers = re.findall(r"Answer: The secret number of the ([a-z ]+) is (\d{5})\.", segment[2400:])
        asked += len(answers)
        assert all(told[building] == number for building, number in answers)
        assert segment.index("Question") >= 2400
    assert asked >= 6
    assert "Question" not in text[6000:]
    assert torch.equal(window.token_ids, prose_window(tokenizer, 0, 6200, 3000, 600, seed=0).token_ids)
    assert not torch.equal(window.token_ids, prose_window(tokenizer, 1, 6200, 3000, 600, seed=0).token_ids)


def test_shape_of_a_model_without_grouped_heads() -> None:
    config = LlamaConfig(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, hidden_size=128, head_dim=None
    )
    assert model_shape(config) == ModelShape(layers=3, query_heads=4, kv_heads=4, head_dim=32)
