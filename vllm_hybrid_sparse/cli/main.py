"""The command `hybrid-sparse`."""

import argparse
import json
import sys
from collections.abc import Sequence

from vllm_hybrid_sparse import __version__
from vllm_hybrid_sparse.cli.smollm2 import model_dir
from vllm_hybrid_sparse.errors import ConfigError, HybridSparseError

_TEXT_TOKENS = 7000
_MAX_TEXT_TOKENS = 7900  # of the model's 8192, so that question and answer fit


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "model":
            print(model_dir(lambda line: print(line, file=sys.stderr)))
            return 0
        return _demo(arguments)
    except HybridSparseError as error:
        print(f"hybrid-sparse: {error}", file=sys.stderr)
        return 1


def _demo(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.text_tokens <= _MAX_TEXT_TOKENS:
        raise ConfigError(f"text-tokens={arguments.text_tokens}: must be 1 to {_MAX_TEXT_TOKENS}")
    try:
        settings = json.loads(arguments.settings)
    except json.JSONDecodeError as error:
        raise ConfigError(f"settings={arguments.settings}: must be JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"settings={arguments.settings}: must be a JSON object")
    from vllm_hybrid_sparse.cli.demo import run_demo  # noqa: PLC0415 - the other commands need no openai client

    return run_demo(arguments.text_tokens, settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybrid-sparse", description="Commands beside `vllm serve`.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("model", help="make SmolLM2-135M-Instruct once, and print its folder")
    demo = commands.add_parser("demo", help="find facts in a long text: stock vLLM, then hybrid_sparse")
    demo.add_argument("--text-tokens", type=int, default=_TEXT_TOKENS, help="length of the text (default %(default)s)")
    demo.add_argument(
        "--settings",
        default="{}",
        metavar="JSON",
        help='settings of hybrid_sparse, e.g. \'{"policy": "topk", "topk_ratio": 0.05}\'',
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
