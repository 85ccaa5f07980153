"""Streamed completions and when each of their tokens arrived."""

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from vllm_hybrid_sparse.cli.server import Server

_TIMEOUT = aiohttp.ClientTimeout(total=1800)


@dataclass(frozen=True, slots=True)
class Stream:
    """Arrivals of one answer, in seconds since the request was sent, each with its number of tokens."""

    sent_s: float  # on the clock of time.perf_counter
    arrivals: tuple[tuple[float, int], ...]
    token_ids: tuple[int, ...]

    @property
    def ttft_ms(self) -> float:
        """Time to first token."""
        return self.arrivals[0][0] * 1e3


def stream_all(
    server: Server, prompts: Sequence[Sequence[int]], max_tokens: int, *, may_end: bool = False
) -> list[Stream]:
    """Send all prompts of token ids at once and return their streams, each `max_tokens` long.

    may_end   an end of sequence ends an answer, as its last token, instead of being ignored
    """

    async def run() -> list[Stream]:
        async with aiohttp.ClientSession(timeout=_TIMEOUT, read_bufsize=2**20) as session:
            streams = (_stream(session, server, prompt, max_tokens, may_end) for prompt in prompts)
            return list(await asyncio.gather(*streams))

    return asyncio.run(run())


async def _stream(
    session: aiohttp.ClientSession, server: Server, prompt: Sequence[int], max_tokens: int, may_end: bool
) -> Stream:
    payload = {
        "model": server.model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": not may_end,
        "stream": True,
        "return_token_ids": True,
    }
    body = json.dumps(payload).encode()
    sent_s = time.perf_counter()
    arrivals: list[tuple[float, int]] = []
    token_ids: list[int] = []
    async with session.post(
        f"{server.base_url}/completions", data=body, headers={"Content-Type": "application/json"}
    ) as reply:
        if reply.status != 200:
            raise server.failure(f"HTTP {reply.status}: {(await reply.text())[:500]}")
        async for line in reply.content:
            arrived_s = time.perf_counter() - sent_s
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line[len(b"data: ") :]).get("choices")
            tokens = (choices[0].get("token_ids") or []) if choices else []
            if tokens:
                arrivals.append((arrived_s, len(tokens)))
                token_ids += tokens
    if not token_ids or (len(token_ids) != max_tokens and not may_end):
        raise server.failure(f"{len(token_ids)} tokens came instead of {max_tokens}")
    return Stream(sent_s, tuple(arrivals), tuple(token_ids))


def token_gaps_ms(streams: Sequence[Stream], skipped: int) -> list[float]:
    """Return times between output tokens while all streams decode, without each one's first `skipped` arrivals then."""
    begun_s = max(stream.sent_s + stream.arrivals[0][0] for stream in streams)
    ended_s = min(stream.sent_s + stream.arrivals[-1][0] for stream in streams)
    gaps: list[float] = []
    for stream in streams:
        inside = [
            (stream.sent_s + at_s, tokens)
            for at_s, tokens in stream.arrivals
            if begun_s <= stream.sent_s + at_s <= ended_s
        ][skipped:]
        for (before_s, _), (at_s, tokens) in itertools.pairwise(inside):
            gaps += [(at_s - before_s) * 1e3 / tokens] * tokens
    return gaps
