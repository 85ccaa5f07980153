"""A real model answers questions about a long text, served by stock vLLM and then with hybrid_sparse."""

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from openai import DefaultHttpxClient, OpenAI, OpenAIError

from vllm_hybrid_sparse.cli.haystack import Haystack, make_haystack
from vllm_hybrid_sparse.cli.kv_read import share_of_kv_read
from vllm_hybrid_sparse.cli.machine_load import BUSY, busy_share
from vllm_hybrid_sparse.cli.progress import Progress
from vllm_hybrid_sparse.cli.server import Server, ServerError, core_list
from vllm_hybrid_sparse.cli.shown_series import shown_series
from vllm_hybrid_sparse.cli.smollm2 import cache_dir, model_dir
from vllm_hybrid_sparse.cli.stream import Reply, complete
from vllm_hybrid_sparse.kernels.paged_attention.native import lacks_bf16

MAX_MODEL_TOKENS = 8192
_DEPTHS, _SEED = (0.3, 0.6, 0.9), 1  # a text in which this small model finds all three facts with exact attention
_KV_CACHE_BYTES = 2 * 2**30
_START_TIMEOUT_S = 900.0  # a cold start compiles the model
_REQUEST_TIMEOUT_S = 600.0
_ANSWER_TOKENS = 12
_TIMED_TOKENS = 128
_SERVED_NAME = "smollm2"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two servers."""

    name: str
    args: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one server showed."""

    answers: tuple[str, ...]
    found: tuple[bool, ...]
    ttft_s: float
    tpot_s: float
    kv_read: float | None  # share of the KV bytes that decoding read; None if /metrics does not say
    series: tuple[str, ...] = ()  # lines that show some of the backend's series on /metrics


def run_demo(text_tokens: int, settings: Mapping[str, object]) -> int:
    """Run both servers in turn and print the comparison; return the exit status.

    text_tokens   length of the text in which the facts are hidden
    settings      for hybrid_sparse, as `--additional-config` takes them; may be empty

    The status is 1 if a server failed or hybrid_sparse missed a fact that stock vLLM found. Servers are stopped
    whatever happens, also on Ctrl-C and SIGTERM.
    """
    signal.signal(signal.SIGTERM, _end_on_signal)
    try:
        return _compare(text_tokens, settings)
    except ServerError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; the server is stopped", file=sys.stderr)
        return 130


def serves_on_cuda() -> bool:
    """Whether the servers run on vLLM's CUDA platform. Its CPU build brings a torch that sees no GPU."""
    return torch.cuda.is_available()


def _compare(text_tokens: int, settings: Mapping[str, object]) -> int:
    model = model_dir()
    haystack = make_haystack(model / "tokenizer.json", text_tokens, _DEPTHS, _SEED)
    print(f"Model: {model.name}. A text of {haystack.tokens} tokens hides {len(haystack.facts)} facts:")
    for fact in haystack.facts:
        print(f"  {fact.sentence}")

    dtype = _dtype_args()
    if dtype:
        print("This CPU has no bfloat16 instructions: both servers get", " ".join(dtype))

    ours_args = (
        *dtype,
        *("--attention-backend", "hybrid_sparse"),
        *("--additional-config", json.dumps({"hybrid_sparse": dict(settings)})),
    )
    stock = _measure(Side("stock vLLM", dtype), model, haystack)
    ours = _measure(Side("hybrid_sparse", ours_args), model, haystack)
    _print_table(stock, ours)

    missed = _missed(haystack, stock, ours)
    if missed:
        print(f"demo: hybrid_sparse missed what stock vLLM found: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _dtype_args() -> tuple[str, ...]:
    """Options for a CPU on which vLLM's matrix products in bfloat16 would take most of the time (docs/OPERATING.md)."""
    return () if serves_on_cuda() or not lacks_bf16() else ("--dtype", "float32")


def _cores() -> dict[str, str]:
    """What names the cores that both servers compute on.

    Of two cores stock vLLM would keep one, and ours would not. With more cores both leave the choice to vLLM, which
    takes one hardware thread of each.
    """
    return {"VLLM_CPU_OMP_THREADS_BIND": core_list()} if len(os.sched_getaffinity(0)) <= 2 else {}


def _missed(haystack: Haystack, stock: Outcome, ours: Outcome) -> list[str]:
    pairs = zip(haystack.facts, stock.found, ours.found, strict=True)
    return [fact.building for fact, by_stock, by_ours in pairs if by_stock and not by_ours]


def _measure(side: Side, model: Path, haystack: Haystack) -> Outcome:
    log_path = cache_dir() / "logs" / f"demo-{side.name.replace(' ', '-')}.log"
    args = [
        *("--served-model-name", _SERVED_NAME),
        *("--max-model-len", str(MAX_MODEL_TOKENS)),
        *("--kv-cache-memory-bytes", str(_KV_CACHE_BYTES)),
        *side.args,
    ]
    print(f"\n── {side.name} ──")
    busy = busy_share(1.0)
    if busy > BUSY:
        print(f"Other programs keep {100 * busy:.0f} % of the processors busy: the times below say little.")
    with Server(model, args, _cores(), log_path) as server:
        with Progress("starting the server:"):
            server.wait_ready(_START_TIMEOUT_S)
        client = OpenAI(
            base_url=server.base_url,
            api_key="none",
            timeout=_REQUEST_TIMEOUT_S,
            max_retries=0,
            http_client=DefaultHttpxClient(trust_env=False),  # no proxy
        )
        try:
            complete(client, _SERVED_NAME, "Once upon a time", 8, _ignore)  # the first request is never typical
            replies = _ask_all(client, haystack)
            timed = _time_decode(client, haystack)
        except OpenAIError as error:
            raise server.failure(f"request failed ({error})") from error
        exposition = _exposition(server)
        with Progress("stopping the server:"):
            server.stop()
    return Outcome(
        answers=tuple(reply.text.strip() for reply in replies),
        found=tuple(fact.found_in(reply.text) for fact, reply in zip(haystack.facts, replies, strict=True)),
        ttft_s=replies[0].ttft_s,  # the later questions find the text in the prefix cache
        tpot_s=timed.tpot_s,
        kv_read=share_of_kv_read(exposition),
        series=tuple(shown_series(exposition)),
    )


def _ask_all(client: OpenAI, haystack: Haystack) -> list[Reply]:
    replies = []
    for number, fact in enumerate(haystack.facts):
        label = f"reading {haystack.tokens} tokens:" if number == 0 else "reading the question:"
        with Progress(label) as progress:
            show = _Shown(progress, before=fact.question.strip())
            reply = complete(client, _SERVED_NAME, haystack.text + fact.question, _ANSWER_TOKENS, show, stop="\n")
        print(f"\n  → {'found' if fact.found_in(reply.text) else 'not found'} (it is {fact.number})")
        replies.append(reply)
    return replies


def _time_decode(client: OpenAI, haystack: Haystack) -> Reply:
    with Progress(f"writing on for {_TIMED_TOKENS} tokens:") as progress:
        reply = complete(client, _SERVED_NAME, haystack.text, _TIMED_TOKENS, _Shown(progress, before=""))
    print()
    return reply


class _Shown:
    """Ends the progress line at the first token and prints tokens as they come."""

    def __init__(self, progress: Progress, before: str) -> None:
        self._progress = progress
        self._before = before

    def __call__(self, text: str) -> None:
        if self._progress.running:
            self._progress.finish("to the first token")
            print(self._before, end="")
        print(text, end="", flush=True)


def _exposition(server: Server) -> str:
    """The text of /metrics; empty if the server does not answer."""
    try:
        return server.metrics()
    except ServerError:  # all questions are answered: the figures are not worth failing for
        return ""


def _print_table(stock: Outcome, ours: Outcome) -> None:
    def row(what: str, left: str, right: str, ratio: str = "") -> None:
        print(f"{what:<24}{left:>14}{right:>16}{ratio:>16}")

    def timing(what: str, left_s: float, right_s: float) -> None:
        row(what, f"{left_s * 1000:.1f} ms", f"{right_s * 1000:.1f} ms", f"{left_s / right_s:.2f} ×")

    read = "not reported" if ours.kv_read is None else f"{100 * ours.kv_read:.1f} %"
    facts = len(stock.found)
    print()
    row("", "stock vLLM", "hybrid_sparse", "stock ÷ ours")
    row("facts found", f"{sum(stock.found)} of {facts}", f"{sum(ours.found)} of {facts}")
    timing("time to first token", stock.ttft_s, ours.ttft_s)
    timing("time per output token", stock.tpot_s, ours.tpot_s)
    row("KV read while decoding", "100 %", read)
    for number, (left, right) in enumerate(zip(stock.answers, ours.answers, strict=True), start=1):
        row(f"answer {number}", left[:13], right[:15])
    if ours.series:
        print("\nhybrid_sparse's /metrics in the end (KV read is read_bytes of context_bytes):")
        print("\n".join(f"  {line}" for line in ours.series))


def _ignore(_text: str) -> None:
    """Take a piece of text and show nothing."""


def _end_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
