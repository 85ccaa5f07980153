"""Greedy completions and counters of a running server, as token ids, over its HTTP API."""

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from vllm_hybrid_sparse.cli.server import Server

_TIMEOUT = aiohttp.ClientTimeout(total=900)  # of a request through the emulated device, on a busy machine


@dataclass(frozen=True, slots=True)
class Answer:
    """What greedy decoding gave for one prompt."""

    token_ids: tuple[int, ...]
    margins: tuple[float, ...] = ()  # log-probability of the best token minus the second's; empty if not asked for

    def cut(self, tokens: int) -> "Answer":
        """Return its first `tokens` tokens."""
        return Answer(self.token_ids[:tokens], self.margins[:tokens])


def difference(expected: Answer, found: Answer) -> str:
    """Return where `found` leaves `expected` and how close the decision was there; empty if they are equal."""
    if found.token_ids == expected.token_ids:
        return ""
    pairs = zip(expected.token_ids, found.token_ids, strict=False)
    place = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
    if place is None:
        return f"{len(found.token_ids)} tokens instead of {len(expected.token_ids)}"
    margin = f", top-2 margin {expected.margins[place]:.2e}" if expected.margins else ""
    return f"token {place}: {found.token_ids[place]} instead of {expected.token_ids[place]}{margin}"


def differences(expected: Sequence[Answer], found: Sequence[Answer]) -> list[str]:
    """Return `difference` of every pair that differs."""
    return [how for pair in zip(expected, found, strict=True) if (how := difference(*pair))]


def margins_where_parted(expected: Sequence[Answer], found: Sequence[Answer]) -> list[float]:
    """For each pair that differs, how close the decision was at which `found` leaves `expected`."""
    parted = []
    for left, right in zip(expected, found, strict=True):
        pairs = zip(left.token_ids, right.token_ids, strict=True)
        parted += [left.margins[place] for place, (one, other) in enumerate(pairs) if one != other][:1]
    return parted


def complete(
    server: Server, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int, margins: bool = False
) -> list[Answer]:
    """Return the greedy answers to prompts of token ids, at most `concurrency` of them in flight."""
    return asyncio.run(_complete_all(server, prompts, max_tokens, concurrency, margins))


def complete_together(server: Server, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    """Like `complete`, but with all prompts in one HTTP request, so that none arrives late on a busy machine."""
    payload = _payload(server, prompts[0], max_tokens) | {"prompt": [list(prompt) for prompt in prompts]}
    status, body = post(server, payload)
    if status != 200:
        raise server.failure(f"HTTP {status} to {len(prompts)} prompts: {body[:500]}")
    choices = sorted(json.loads(body)["choices"], key=lambda choice: int(choice["index"]))
    return [Answer(tuple(choice["token_ids"])) for choice in choices]


def complete_while_aborting(
    server: Server, prompts: Sequence[Sequence[int]], aborted: Sequence[Sequence[int]], max_tokens: int
) -> list[Answer]:
    """Like `complete`, all at once, while clients of the prompts `aborted` hang up after a few tokens each."""

    async def both() -> list[Answer]:
        answers = asyncio.create_task(_complete_all(server, prompts, max_tokens, len(prompts), margins=False))
        await asyncio.gather(*(_hang_up(server, prompt, after=1 + index) for index, prompt in enumerate(aborted)))
        return await answers

    return asyncio.run(both())


def hang_up(server: Server, prompt: Sequence[int], after: int) -> None:
    """Stream a long answer and close the connection after `after` chunks; with 0, while the prompt is computed."""
    asyncio.run(_hang_up(server, prompt, after))


def post(server: Server, payload: dict[str, object]) -> tuple[int, str]:
    """Send one completion request as it is; return the HTTP status and the body."""

    async def send() -> tuple[int, str]:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as session,
            session.post(f"{server.base_url}/completions", json=payload) as reply,
        ):
            return reply.status, await reply.text()

    return asyncio.run(send())


def metric(server: Server, name: str) -> float:
    """Return the sum over all labels of one Prometheus metric; KeyError if the server has none of that name."""
    root = server.base_url.removesuffix("/v1")
    with urllib.request.urlopen(f"{root}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name]
    if not values:
        raise KeyError(f"{name}: not among the metrics of {root}")
    return sum(values)


def _payload(server: Server, prompt: Sequence[int], max_tokens: int) -> dict[str, object]:
    return {
        "model": server.model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def _complete_all(
    server: Server, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int, margins: bool
) -> list[Answer]:
    free = asyncio.Semaphore(concurrency)

    async def one(session: aiohttp.ClientSession, prompt: Sequence[int]) -> Answer:
        payload = _payload(server, prompt, max_tokens) | ({"logprobs": 2} if margins else {})
        async with free, session.post(f"{server.base_url}/completions", json=payload) as reply:
            body = await reply.text()
            if reply.status != 200:
                raise server.failure(f"HTTP {reply.status} to a prompt of {len(prompt)} tokens: {body[:500]}")
        choice = json.loads(body)["choices"][0]
        return Answer(tuple(choice["token_ids"]), _margins(choice["logprobs"]) if margins else ())

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector) as session:
        return list(await asyncio.gather(*(one(session, prompt) for prompt in prompts)))


def _margins(logprobs: dict[str, list[dict[str, float]]]) -> tuple[float, ...]:
    ranked = [sorted(step.values(), reverse=True) for step in logprobs["top_logprobs"]]
    return tuple(best[0] - best[1] if len(best) > 1 else 0.0 for best in ranked)  # one entry: both have one text


async def _hang_up(server: Server, prompt: Sequence[int], after: int) -> None:
    payload = _payload(server, prompt, max_tokens=512) | {"stream": True}
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        request = asyncio.create_task(session.post(f"{server.base_url}/completions", json=payload).__aenter__())
        if after == 0:
            await asyncio.sleep(0.05)
            request.cancel()
            return
        reply = await request
        seen = 0
        async for line in reply.content:
            seen += line.startswith(b"data: ")
            if seen >= after:
                break
        reply.close()
