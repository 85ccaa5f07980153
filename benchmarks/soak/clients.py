"""What the clients of a soak do, and the counts of what came of it."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from benchmarks.soak.awake_clock import AwakeClock
from benchmarks.soak.known import Known
from benchmarks.soak.talk import Reply, Talk
from benchmarks.soak.wrong_requests import Wrong, random_request
from vllm_hybrid_sparse.load.sse import StreamError

PATIENCE_S = 600.0  # awake seconds for an answer that must come
_RANDOM_PATIENCE_S = 30.0  # for the reply to a random request
_HANG_UP_S = 1.5  # longest wait of a client that leaves before its answer
_LONG_TOKENS = 160  # of answers that are broken off
_MOST_KEPT = 50  # mishaps whose details are kept


@dataclass(slots=True)
class Tally:
    """What came of the requests; written by the clients, all on one event loop."""

    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0  # received in all
    mishaps: list[dict[str, Any]] = field(default_factory=list)

    def mishap(self, kind: str, **details: Any) -> None:
        """Count something that must not happen, and keep the first with their details."""
        self.counts[kind] += 1
        if len(self.mishaps) < _MOST_KEPT:
            self.mishaps.append({"kind": kind} | details)


class Clients:
    """Everything that the server is asked under load."""

    def __init__(
        self, talk: Talk, root: str, known: Sequence[Known], wrong: Sequence[Wrong], clock: AwakeClock, tally: Tally
    ) -> None:
        self._talk = talk
        self._place = urlsplit(root)
        self._known = known
        self._wrong = wrong
        self._clock = clock
        self._tally = tally

    async def act_until(self, end_s: float, rng: random.Random, pause_s: float) -> None:
        """Be one client until the clock shows `end_s`, thinking `pause_s` on average between two actions."""
        actions = (
            (self.check, 50), (self.break_off, 14), (self.leave_early, 8), (self.make_a_mistake, 14),
            (self.send_anything, 10), (self.sample, 4),
        )  # fmt: skip
        while self._clock.awake_s < end_s:
            action = rng.choices([one for one, _ in actions], [weight for _, weight in actions])[0]
            await action(rng)
            await asyncio.sleep(rng.expovariate(1 / pause_s))

    async def check(self, rng: random.Random) -> None:
        """Ask a known prompt, streamed or not, its prefix cached or not; the answer must be the known one."""
        known = rng.choice(self._known)
        salt = {"cache_salt": f"{rng.getrandbits(64):x}"} if rng.random() < 0.3 else {}
        body = self._talk.greedy(known.prompt, len(known.answer), **salt)
        stream = rng.random() < 0.5
        how = {"prompt_tokens": len(known.prompt), "streamed": stream, "salted": bool(salt)}
        try:
            work = self._talk.streamed(body) if stream else self._talk.whole(body)
            reply = await self._clock.within(PATIENCE_S, work)
        except (aiohttp.ClientError, OSError, StreamError) as error:
            self._tally.mishap("lost", why=f"{type(error).__name__}: {error}"[:300], **how)
            return
        if reply.status != 200:
            self._tally.mishap("lost", why=f"HTTP {reply.status}: {reply.text}", **how)
            return
        self._tally.tokens += len(reply.token_ids)
        if reply.token_ids == known.answer:
            self._tally.counts["right"] += 1
        else:
            self._tally.mishap("wrong", expected=known.answer, found=reply.token_ids, **how)

    async def break_off(self, rng: random.Random) -> None:
        """Stream a long answer and hang up after some tokens; these must be the known ones."""
        known = rng.choice(self._known)
        after = rng.randint(1, 2 * len(known.answer))
        reply = await self._answered(self._talk.streamed(self._talk.greedy(known.prompt, _LONG_TOKENS), after))
        if reply is not None and reply.status != 200:
            self._tally.mishap("lost", why=f"HTTP {reply.status}: {reply.text}", broken_off=True)
        elif reply is not None:
            begun = len(known.answer)
            self._tally.tokens += len(reply.token_ids)
            if reply.token_ids[:begun] != known.answer[: len(reply.token_ids)]:
                self._tally.mishap("wrong", expected=known.answer, found=reply.token_ids, broken_off=True)
            self._tally.counts["broken off"] += 1

    async def leave_early(self, rng: random.Random) -> None:
        """Hang up before the first token, or in the middle of sending."""
        if rng.random() < 0.3:
            await self._talk.half_a_request(str(self._place.hostname), self._place.port or 80)
        else:
            body = self._talk.greedy(
                rng.choice(self._known).prompt, _LONG_TOKENS, cache_salt=f"{rng.getrandbits(64):x}"
            )
            await self._talk.hang_up(body, rng.uniform(0, _HANG_UP_S))
        self._tally.counts["left early"] += 1

    async def make_a_mistake(self, rng: random.Random) -> None:
        """Send a request with a known mistake, which must get one of the right statuses."""
        wrong = rng.choice(self._wrong)
        reply = await self._answered(self._talk.raw(wrong))
        if reply is not None and reply.status not in wrong.right:
            self._tally.mishap("unexpected", request=wrong.name, status=reply.status, text=reply.text)
        self._tally.counts["mistakes"] += 1

    async def send_anything(self, rng: random.Random) -> None:
        """Send a random request; whatever comes back, the server must go on."""
        body = random_request(self._talk.model, rng)
        self._tally.counts["random"] += 1
        try:
            reply = await self._clock.within(_RANDOM_PATIENCE_S, self._talk.raw(Wrong(name="random", body=body)))
        except TimeoutError:
            self._tally.counts["random, given up"] += 1
        except (aiohttp.ClientError, OSError) as error:
            self._tally.mishap("lost", why=f"{type(error).__name__}: {error}"[:300], request=repr(body))
        else:
            self._tally.counts[f"random, HTTP {reply.status}"] += 1
            if reply.status >= 500:
                self._tally.mishap("server errors", request=repr(body), status=reply.status, text=reply.text)

    async def sample(self, rng: random.Random) -> None:
        """Ask for several answers of random tokens; only their number is known."""
        known, tokens = rng.choice(self._known), rng.randint(1, 24)
        body = self._talk.greedy(known.prompt, tokens, n=rng.randint(1, 3), seed=rng.getrandbits(32))
        reply = await self._answered(self._talk.whole(body | {"temperature": rng.choice((0.7, 1.0, 2.0))}))
        if reply is not None:
            self._tally.tokens += len(reply.token_ids)
            if len(reply.token_ids) != tokens:
                self._tally.mishap("wrong", expected=f"{tokens} tokens", found=reply.token_ids, status=reply.status)
            self._tally.counts["sampled"] += 1

    async def _answered(self, work: Any) -> Reply | None:
        """Return the reply to a request that must have one; None if none came, which is counted."""
        try:
            return await self._clock.within(PATIENCE_S, work)
        except (aiohttp.ClientError, OSError, StreamError) as error:
            self._tally.mishap("lost", why=f"{type(error).__name__}: {error}"[:300])
            return None
