"""Puts load on one or more servers, as the options of the command line say."""

import asyncio
import contextlib
import os
import resource
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp

from vllm_hybrid_sparse.cli.bench_options import BenchOptions, report_files
from vllm_hybrid_sparse.cli.prose import prose
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.arrivals import ClosedLoop, Schedule, by_arrival, poisson, recorded, seed_of_round
from vllm_hybrid_sparse.load.capacity import Slo, psa_slos
from vllm_hybrid_sparse.load.client import new_session
from vllm_hybrid_sparse.load.mixes import QUESTIONS, cut_to_words, document_mix, mixed, prose_mix
from vllm_hybrid_sparse.load.page import page
from vllm_hybrid_sparse.load.report import document, write_json
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.search import Capacity, search_in_turns
from vllm_hybrid_sparse.load.side import MeasuringError, Side, served_model
from vllm_hybrid_sparse.load.summary import summary
from vllm_hybrid_sparse.load.task_mix import task_mix
from vllm_hybrid_sparse.load.task_samples import measured_tokens
from vllm_hybrid_sparse.load.traces import read_text, read_trace, write_text, write_trace
from vllm_hybrid_sparse.load.turns import Load, Results, prepare, rounds

_DEFAULT_REQUESTS = 32  # of prose, and of tasks
_SHORT_SAMPLE_WORDS, _LONG_SAMPLE_WORDS = 100, 400  # samples whose tokens the server counts
_USUAL_WORDS_PER_TOKEN = 0.75  # of English, if the server does not count
_SENTENCE_WORDS = 8  # in the shortest sentence that the grammar makes
_INTERRUPTED = 130
_NOTHING_MEASURED = "bench: interrupted before anything was measured"


def run_bench(options: BenchOptions, command: Sequence[str]) -> int:
    """Measure, print a summary and write the report; return 0, 1 if requests failed, 130 if interrupted.

    A search for the capacity goes beyond it on purpose, so there failed requests do not make the status 1.
    """
    _allow_many_connections()
    try:
        return asyncio.run(_Bench(options, command).measure())
    except asyncio.CancelledError:  # on a second interruption, or on one before there was anything to measure
        return _INTERRUPTED


def write_prose(words: int, seed: int) -> str:
    """Return made-up prose of at least `words` words."""
    return " ".join(prose(words // _SENTENCE_WORDS + 1, seed))


def _say(line: str) -> None:
    """Show progress, as long as somebody reads it: Ctrl-C ends a `tee` behind this command, too."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _allow_many_connections() -> None:
    """Let this process have as many open sockets as it may: each request has its own, and 1024 is a usual limit."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Bench:
    """One invocation of the command."""

    def __init__(self, options: BenchOptions, command: Sequence[str]) -> None:
        self._options = options
        self._command = command
        self._stop = asyncio.Event()
        self._ready = False  # from then on an interruption leaves a report
        self._all_results: list[Results] = []
        self._slos: tuple[Slo, ...] = ()
        self._searches: list[Capacity] = []

    async def measure(self) -> int:
        self._listen_to_signals()
        async with new_session() as session:
            load = await self._get_ready(session)
            self._ready = True
            for results in self._all_results:
                await prepare(results.side, load, stop=self._stop, say=_say)
            try:
                await (self._search(load) if self._options.capacity else self._rounds(load))
            except MeasuringError as error:  # before a run: what was measured until then is kept
                if not any(results.runs for results in self._all_results):
                    raise
                _say(f"bench: broken off: {error}")
                return self._finish(load, broken_off=True)
        return self._finish(load)

    def _listen_to_signals(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def interrupt() -> None:
            if not self._ready:
                _say(_NOTHING_MEASURED)
            elif not self._stop.is_set():
                self._stop.set()
                _say("bench: interrupted; again to end without a report")
                return
            if task is not None:
                task.cancel()  # do not wait, not even for the request under way

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)

    async def _get_ready(self, session: aiohttp.ClientSession) -> Load:
        options = self._options
        texts = {path.name: read_text("documents", path) for path in options.documents}
        if len(texts) < len(options.documents):
            raise ConfigError(
                f"documents: must differ in name; there are {len(options.documents)} of {len(texts)} names"
            )
        questions = QUESTIONS if options.questions is None else _lines(read_text("questions", options.questions))
        recordings = [read_trace(path) for path in options.traces]
        sides = [await self._find_out(session, number) for number in range(len(options.targets))]
        self._all_results = [Results(side) for side in sides]
        requests = [*recordings, *await self._made_up(sides[0], texts, questions)]
        trace = by_arrival(requests) if options.recorded_times else mixed(requests, options.seed)
        trace = self._as_many_as_asked(trace)
        for request in trace:
            for side in sides:
                side.target.check(request)
        if options.recorded_times:
            recorded(trace, options.speed)  # refused now rather than after the warm-up
        if options.save_trace is not None:
            write_trace(options.save_trace, trace)
        load = Load(
            requests=tuple(trace),
            # a new one each time: servers outlive a measurement
            salt=None if options.salt == "never" else secrets.token_hex(8),
            spares_groups=options.salt == "auto",
            prime=any(request.group is not None for request in trace),
            warm_up=options.warm_up,
        )
        as_they_are = sum(load.leaves(request) and request.group is None for request in trace)
        if as_they_are:
            _say(
                f"bench: {as_they_are} of {len(trace)} prompts go as they are: a server's prefix cache may hold them "
                "from the warm-up on"
            )
        return replace(load, salt=None) if all(map(load.leaves, trace)) else load

    async def _find_out(self, session: aiohttp.ClientSession, number: int) -> Side:
        options, target = self._options, self._options.targets[number]
        api_key = os.environ.get("OPENAI_API_KEY", "").strip() or None
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("OPENAI_API_KEY: must have printable ASCII characters only, as it is sent in a header")
        model = await served_model(session, target.address, options.model, api_key, say=_say)
        side = Side(session, replace(target, model=model, api_key=api_key))
        await side.find_out(Request(prompt=write_prose(_SHORT_SAMPLE_WORDS, options.seed), max_tokens=2))
        return side

    async def _made_up(self, side: Side, texts: dict[str, str], questions: Sequence[str]) -> list[list[Request]]:
        options = self._options
        traces: list[list[Request]] = []
        if texts:
            words = None
            if options.document_tokens is not None:
                sample = next(iter(texts.values()))
                words = max(1, round(options.document_tokens * await self._words_per_token(side, sample)))
            traces.append(
                document_mix(
                    texts, questions, options.questions_per_document, options.output, options.seed,
                    words=words, ignore_eos=not options.stop_at_eos,
                )
            )  # fmt: skip
        if options.prose is not None:
            words_per_token = await self._words_per_token(side, write_prose(_LONG_SAMPLE_WORDS, options.seed))
            traces.append(
                prose_mix(
                    write_prose, options.prose, options.output, options.requests or _DEFAULT_REQUESTS,
                    words_per_token, options.seed, ignore_eos=not options.stop_at_eos,
                )
            )  # fmt: skip
        if options.tasks is not None:
            tokens_of = await measured_tokens(side, options.tasks, options.task_lengths, prose, options.seed, say=_say)
            traces.append(
                task_mix(
                    options.tasks, options.task_lengths, tokens_of, prose, options.requests or _DEFAULT_REQUESTS,
                    options.seed, output=options.task_output, ignore_eos=not options.stop_at_eos,
                )
            )  # fmt: skip
        return traces

    async def _words_per_token(self, side: Side, text: str) -> float:
        """Return the words per token of such a text, by the server's own count of two samples."""
        counts = []
        samples = [cut_to_words(text, words) for words in (_SHORT_SAMPLE_WORDS, _LONG_SAMPLE_WORDS)]
        for sample in samples:
            record = await side.ask(Request(prompt=sample, max_tokens=1))
            counts.append(record.prompt_tokens)
        words = [len(sample.split()) for sample in samples]
        if counts[0] is None or counts[1] is None or counts[1] <= counts[0]:
            _say(f"{side.name}: does not count prompts of {words[1]} words; a token counts as {_USUAL_WORDS_PER_TOKEN}")
            return _USUAL_WORDS_PER_TOKEN
        return (words[1] - words[0]) / (counts[1] - counts[0])

    def _as_many_as_asked(self, trace: list[Request]) -> list[Request]:
        asked = self._options.requests
        if asked is None:
            return trace
        if asked > len(trace):
            raise ConfigError(
                f"requests={asked}: the trace has {len(trace)}; ask more questions or give more documents"
            )
        return trace[:asked]

    async def _rounds(self, load: Load) -> None:
        options, count = self._options, len(load.requests)

        def schedule_of(number: int) -> Schedule:
            if options.rate is not None:
                return poisson(options.rate, count, seed_of_round(options.seed, number))
            if options.clients is not None:
                return ClosedLoop(options.clients)
            return recorded(load.requests, options.speed)

        await rounds(self._all_results, load, schedule_of, options.rounds, stop=self._stop, say=_say)

    async def _search(self, load: Load) -> None:
        options, reference = self._options, self._all_results[0].side
        iteration_s = reference.unloaded.gap_s if options.iteration_ms is None else options.iteration_ms / 1e3
        if not iteration_s and not self._stop.is_set():
            why = "no answer had two tokens" if iteration_s is None else "tokens arrive together"
            raise ConfigError(f"iteration-ms: could not be measured, as {why}; give it")
        self._slos = psa_slos(iteration_s) if iteration_s else ()
        self._searches = await search_in_turns(
            self._all_results,
            load,
            lambda rate, count: poisson(rate, count, options.seed),
            self._slos,
            options.search,
            stop=self._stop,
            say=_say,
        )

    def _finish(self, load: Load, *, broken_off: bool = False) -> int:
        options, interrupted = self._options, self._stop.is_set()
        if not any(results.runs for results in self._all_results):
            _say(_NOTHING_MEASURED)
            return _INTERRUPTED
        content = document(
            load,
            self._all_results,
            limits=options.goodput,
            slos=self._slos,
            searches=self._searches,
            settings=options.arguments,
            command=self._command,
            interrupted=interrupted or broken_off,
            keep_text=options.keep_text,
        )
        files = report_files(options.out)
        for path, write in zip(files, (write_json, _write_page), strict=True):
            write(path, content)
        shown = "\n".join([summary(content), *(f"written: {path}" for path in files)])
        with contextlib.suppress(OSError):  # as in `_say`
            print(shown.encode(errors="backslashreplace").decode(), flush=True)
        if interrupted:
            return _INTERRUPTED
        failed = any(not results.figures().all_answered for results in self._all_results)
        return int(broken_off or (failed and not options.capacity))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _write_page(path: Path, content: dict[str, object]) -> None:
    write_text(path, page(content))
