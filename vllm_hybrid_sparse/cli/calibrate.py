"""`hybrid-sparse calibrate`: train a predictor of head properties for one model (Fluxion, section 5.2).

A window is one prompt. Each window's samples are saved in a work folder at once, so a calibration that was stopped
continues with the first window that is missing.
"""

import hashlib
import json
import math
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from vllm_hybrid_sparse.cli.calibration_texts import TextWindow, file_windows, prose_window
from vllm_hybrid_sparse.cli.collect import SamplingPlan, collect_window
from vllm_hybrid_sparse.cli.model_digest import model_digest
from vllm_hybrid_sparse.cli.output_file import writable
from vllm_hybrid_sparse.cli.progress import Progress
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.hf.shape import model_shape, windowed_layers
from vllm_hybrid_sparse.predictor.features import FEATURE_VERSION
from vllm_hybrid_sparse.predictor.model import PARAMETERS, ModelShape, PredictorOrigin
from vllm_hybrid_sparse.predictor.samples import Samples
from vllm_hybrid_sparse.predictor.training import TrainingConfig, split_prompts, train
from vllm_hybrid_sparse.predictor.validation import validate
from vllm_hybrid_sparse.values import UNREAD_ATTRIBUTED, PageRanking, RetainedSet
from vllm_hybrid_sparse.whole_file import whole_file


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """The options of the command; a bad one is refused with its rule before anything is loaded."""

    model: str  # folder or name of a Transformers causal language model
    texts: tuple[Path, ...]  # UTF-8
    out: Path  # predictor file
    work: Path | None = None  # folder of the samples; None: `out` with .work appended
    tokens: int = 4096  # of a window
    windows: int = 16  # most windows of each text; >= 1
    prose_windows: int = 4  # windows of made-up prose with questions; >= 0
    skip_tokens: int = 0  # first tokens of each text that are left out; >= 0
    plan: SamplingPlan = field(default_factory=lambda: SamplingPlan(segment_tokens=1024, span_tokens=256, steps=8))
    tau: float = 0.1  # error to keep (eq. 2); > 0
    training: TrainingConfig = field(default_factory=TrainingConfig)
    retained: RetainedSet = field(default_factory=RetainedSet)
    ranking: PageRanking = field(default_factory=PageRanking)
    unread_attributed: float = UNREAD_ATTRIBUTED  # the setting when serving; 0 to 1, unused without key codes

    def __post_init__(self) -> None:
        for name, value, legal, rule in (
            ("texts", "", bool(self.texts), "one file or more"),
            ("windows", self.windows, self.windows >= 1, "1 or more"),
            ("prose-windows", self.prose_windows, self.prose_windows >= 0, "0 or more"),
            ("skip-tokens", self.skip_tokens, self.skip_tokens >= 0, "0 or more"),
            ("tau", self.tau, 0 < self.tau < math.inf, "above 0"),
            ("unread-attributed", self.unread_attributed, 0 <= self.unread_attributed <= 1, "0 to 1"),
        ):
            if not legal:
                raise ConfigError(f"{name}={value}: must be {rule}")
        self.plan.check(self.tokens, self.retained)
        for path in self.texts:
            if not path.is_file():
                raise ConfigError(f"texts={path}: no such file")
        writable("out", self.out)

    @property
    def attributed(self) -> float:
        """Share of the unread blocks' weight that labels give to the blocks read; only key codes estimate it."""
        return self.unread_attributed if self.ranking.code_bits else 0.0

    @property
    def work_folder(self) -> Path:
        """Where the samples are kept."""
        return self.work or self.out.with_name(f"{self.out.name}.work")

    def command(self) -> str:
        """The command with these options, files by their names alone."""
        words = ["hybrid-sparse", "calibrate", Path(self.model).name, "--texts", *(path.name for path in self.texts)]
        numbers = {
            "tokens": self.tokens, "windows": self.windows, "prose-windows": self.prose_windows,
            "skip-tokens": self.skip_tokens, "segment-tokens": self.plan.segment_tokens,
            "span-tokens": self.plan.span_tokens, "sink-tokens": self.retained.sink_tokens,
            "window-tokens": self.retained.window_tokens, "steps": self.plan.steps, "tau": self.tau,
            "epochs": self.training.epochs, "quantile": self.training.quantile, "seed": self.training.seed,
        }  # fmt: skip
        words += ["--summary", self.ranking.summary]
        if self.ranking.code_bits:
            words += ["--code-bits", str(self.ranking.code_bits), "--unread-attributed", str(self.unread_attributed)]
        words += [
            "--out",
            self.out.name,
            *(word for name, value in numbers.items() for word in (f"--{name}", str(value))),
        ]
        return shlex.join(words)


def calibrate(options: CalibrationOptions) -> dict[str, float]:
    """Collect what is missing, train, write the predictor; return its figures on held-out windows.

    raises   ConfigError for a model, a text or a work folder that does not fit the options
    """
    config = _model_config(options)
    shape = model_shape(config)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    windows = _windows(options, tokenizer)
    training_prompts, held_out = split_prompts([window.source for window in windows], options.training)
    _claim_work_folder(options, shape, windows)
    _collect(options, windows)

    prompts = [Samples.load(_shard(options, index)) for index in range(len(windows))]
    heads = sum(prompts[index].budgets[..., 0].size for index in training_prompts)
    with Progress(f"training {PARAMETERS} parameters on {heads} heads of {len(training_prompts)} windows") as progress:
        losses: list[float] = []
        training = [prompts[index] for index in training_prompts]
        predictor = train(training, options.training, lambda _, loss: losses.append(loss))
        progress.finish(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    figures = validate(predictor, [prompts[index] for index in held_out], shape.kv_heads)
    origin = PredictorOrigin(
        shape=shape,
        model=Path(options.model).name,
        tau=options.tau,
        retained=options.retained,
        ranking=options.ranking,
        unread_attributed=options.attributed,
        command=options.command(),
        validation={name: round(value, 5) for name, value in figures.items() if math.isfinite(value)},
    )
    predictor.save(options.out, origin)
    return figures


def _model_config(options: CalibrationOptions) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(options.model).get_text_config()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model={options.model}: must be the folder or the name of a Transformers causal language model "
            f"({str(error).partition(chr(10))[0]})"
        ) from error
    if windowed := windowed_layers(config):
        raise ConfigError(
            f"model={options.model}: {windowed} of its layers have a sliding window, which policy fluxion is not "
            "served beside"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest and options.tokens > longest:
        raise ConfigError(f"tokens={options.tokens}: must be at most {longest}, the longest sequence of the model")
    return config


def _windows(options: CalibrationOptions, tokenizer: PreTrainedTokenizerBase) -> list[TextWindow]:
    plan = options.plan
    windows = [
        window
        for path in options.texts
        for window in file_windows(tokenizer, path, options.tokens, options.windows, options.skip_tokens)
    ]
    return windows + [
        prose_window(tokenizer, number, options.tokens, plan.segment_tokens, plan.span_tokens, options.training.seed)
        for number in range(options.prose_windows)
    ]


def _claim_work_folder(options: CalibrationOptions, shape: ModelShape, windows: list[TextWindow]) -> None:
    """Write down what the samples depend on, or compare it with what is written there."""
    manifest: dict[str, Any] = {
        "model": Path(options.model).name,
        "model_digest": model_digest(options.model),
        **asdict(shape),
        **asdict(options.plan),
        **asdict(options.retained),
        **asdict(options.ranking),
        "tau": options.tau,
        "unread_attributed": options.attributed,
        "seed": options.training.seed,
        "feature_version": FEATURE_VERSION,
        "windows": [  # in their order: shards are numbered
            [window.name, hashlib.sha256(window.token_ids.numpy().tobytes()).hexdigest()[:16]] for window in windows
        ],
    }
    path = options.work_folder / "manifest.json"
    if path.is_file() or any(options.work_folder.glob("window-*.npz")):
        found = _read_manifest(path, options)
        for name, value in manifest.items():
            if found.get(name) != value:
                raise ConfigError(
                    f"work={options.work_folder}: holds samples of another {name}; name another folder or delete it"
                )
        return
    try:
        options.work_folder.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as scratch:
            scratch.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"work={options.work_folder}: must be a folder that can be written ({error.strerror})"
        ) from error


def _read_manifest(path: Path, options: CalibrationOptions) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"work={options.work_folder}: holds samples of which nothing says what they are of; name another folder or "
            "delete it"
        ) from error
    return found if isinstance(found, dict) else {}


def _collect(options: CalibrationOptions, windows: list[TextWindow]) -> None:
    """Make the shards that are missing."""
    missing = [index for index in range(len(windows)) if not _shard(options, index).is_file()]
    if not missing:
        return
    # float32 is several times as fast on CPUs without matrix instructions for bf16, and makes the labels exact
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    for index in missing:
        window = windows[index]
        with Progress(f"window {index + 1} of {len(windows)} ({window.name})") as progress:
            seed = f"{options.training.seed} {index}"
            samples = collect_window(
                model,
                window.token_ids,
                options.plan,
                options.retained,
                options.ranking,
                options.tau,
                options.attributed,
                seed,
            )
            samples.save(_shard(options, index))
            streaming = (samples.budgets[..., 0] == 0).mean()
            progress.finish(f"{samples.budgets[..., 0].size} heads, {streaming:.0%} streaming")


def _shard(options: CalibrationOptions, index: int) -> Path:
    return options.work_folder / f"window-{index:04}.npz"
