"""One request and what became of it."""

import itertools
from dataclasses import dataclass
from enum import StrEnum

from vllm_hybrid_sparse.load.answer import Answer, Arrival, Counted
from vllm_hybrid_sparse.load.requests import Request


class Outcome(StrEnum):
    """How a request, or one attempt at it, ended."""

    OK = "ok"  # answered to the end
    REFUSED = "refused"  # the server answered with an HTTP error
    FAILED = "failed"  # no connection, or a stream that broke off or made no sense
    TIMEOUT = "timeout"  # not answered to the end in time
    ABORTED = "aborted"  # cut off by us when the run was interrupted


@dataclass(frozen=True, slots=True)
class Attempt:
    """One sending of a request."""

    begun_s: float  # after the request was first sent
    outcome: Outcome
    reason: str  # empty if it is ok


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a client saw of one request. Times are seconds after it was first sent, unless a field says otherwise."""

    index: int  # in the trace
    group: str | None
    due_s: float | None  # after the start of the run; None in closed loop
    sent_s: float  # after the start of the run
    ended_s: float
    arrivals: tuple[Arrival, ...]
    outcome: Outcome
    reason: str
    attempts: tuple[Attempt, ...]
    sendings: int  # how often it was sent; an interruption while waiting to send again is an attempt, not a sending
    prompt_tokens: int | None  # as the server counts them; None if it does not tell
    cached_tokens: int | None  # of these, from its prefix cache; None if it does not tell
    output_tokens: int
    counted: Counted
    max_tokens: int
    ignore_eos: bool
    finish_reason: str | None
    text: str
    source: str | None = None  # what made the request; None: not known

    @property
    def ok(self) -> bool:
        """Whether the answer came to its end."""
        return self.outcome is Outcome.OK

    @property
    def short(self) -> bool:
        """Whether an answer that should have had `max_tokens` tokens came to its end with fewer."""
        return self.ok and self.ignore_eos and self.output_tokens < self.max_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None if none came."""
        return self.arrivals[0].at_s if self.arrivals else None

    @property
    def e2e_s(self) -> float | None:
        """Time to the last token; None if none came."""
        return self.arrivals[-1].at_s if self.arrivals else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between arrivals; tokens that came together have no gap between them."""
        return [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(self.arrivals)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two."""
        if self.output_tokens < 2 or not self.arrivals:
            return None
        return (self.arrivals[-1].at_s - self.arrivals[0].at_s) / (self.output_tokens - 1)

    @property
    def lag_s(self) -> float | None:
        """How late we sent it; None in closed loop."""
        return None if self.due_s is None else self.sent_s - self.due_s


class Exchange:
    """A request under way. Written by the client that performs it; times are those of the run's clock."""

    def __init__(self, index: int, request: Request, due_s: float | None = None) -> None:
        self.index = index
        self.request = request
        self.due_s = due_s
        self.answer = Answer()
        self.sent_s: float | None = None
        self._ended_s: float | None = None
        self._attempts: list[Attempt] = []
        self._attempt_s = 0.0
        self._sendings = 0

    @property
    def over(self) -> bool:
        """Whether the outcome of the request is known."""
        return self._ended_s is not None

    def begin_attempt(self, now_s: float) -> None:
        """Take note that the request is sent, for the first time or again; an earlier answer is dropped."""
        if self.sent_s is None:
            self.sent_s = now_s
        self._attempt_s = now_s
        self._sendings += 1
        self.answer = Answer()

    def end_attempt(self, outcome: Outcome, reason: str = "") -> None:
        """Take note of how the attempt ended."""
        assert self.sent_s is not None, "an attempt ends after it began"
        self._attempts.append(Attempt(self._attempt_s - self.sent_s, outcome, reason))

    def end(self, now_s: float) -> None:
        """Take note that there is no further attempt: the outcome is that of the last one."""
        self._ended_s = now_s

    def abort(self, now_s: float) -> None:
        """Take note that we cut the request off."""
        if self.sent_s is None:
            self.sent_s = self._attempt_s = now_s
        self.end_attempt(Outcome.ABORTED, "the run was interrupted")
        self.end(now_s)

    def record(self, start_s: float) -> Record:
        """Return what became of the request, in a run that started at `start_s`."""
        assert self.sent_s is not None, "a record is made of an exchange that was begun"
        assert self._ended_s is not None, "a record is made of an exchange that is over"
        last, answer, sent_s = self._attempts[-1], self.answer, self.sent_s
        return Record(
            index=self.index,
            group=self.request.group,
            due_s=self.due_s,
            sent_s=sent_s - start_s,
            ended_s=self._ended_s - sent_s,
            arrivals=tuple(Arrival(at_s - sent_s, tokens) for at_s, tokens in answer.arrivals),
            outcome=last.outcome,
            reason=last.reason,
            attempts=tuple(self._attempts),
            sendings=self._sendings,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.tokens,
            counted=answer.counted,
            max_tokens=self.request.max_tokens,
            ignore_eos=self.request.ignore_eos,
            finish_reason=answer.finish_reason,
            text=answer.text,
            source=self.request.source,
        )
