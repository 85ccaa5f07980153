"""Thousands of requests, four at a time."""

from collections.abc import Sized
from typing import Protocol

REQUESTS = 10_000


class Traffic(Protocol):
    """Requests that come, decode a few tokens and leave."""

    started: int

    @property
    def running(self) -> Sized:
        """Requests that have not left."""

    def start(self) -> None:
        """One more request comes."""

    def decode(self) -> None:
        """Run a step of all running requests."""

    def leave(self) -> None:
        """Some of them leave."""

    def check(self) -> None:
        """Raise AssertionError if something is lost."""


def drive(traffic: Traffic) -> None:
    """Have all requests come and leave, and check now and then."""
    steps = 0
    while traffic.started < REQUESTS or len(traffic.running):
        while traffic.started < REQUESTS and len(traffic.running) < 4:
            traffic.start()
        traffic.decode()
        traffic.leave()
        steps += 1
        if steps % 100 == 0:
            traffic.check()
