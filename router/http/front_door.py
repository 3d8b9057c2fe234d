"""What the HTTP and gRPC endpoints are given: one served model, what is behind it, and the limits of this process.

Knows nothing of their messages. The invariant: no more than `max_ongoing_requests` answers are in the making at once.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.board import Registration
from cluster.metrics import Metrics
from cluster.protocol.errors import Overloaded
from router.generation import Generator
from router.http.text_codec import TextCodec
from router.http.validate import Limits

# Longer texts are tokenised on another thread, because they would hold up every stream of this process.
LONG_TEXT_CHARS = 4096


class Load:
    """Counts answers in the making and refuses those above the cap."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.running = 0

    def check(self, answers: int = 1) -> None:
        """Raises Overloaded when the cap does not allow so many more: ask before any work."""
        if self.running + answers > self.cap:
            raise Overloaded(f"{self.running} requests are running, which is this server's limit; try again later")

    @contextmanager
    def entered(self, answers: int = 1) -> Iterator[None]:
        self.check(answers)
        self.running += answers
        try:
            yield
        finally:
            self.running -= answers


def _always_healthy() -> bool:
    return True


@dataclass(frozen=True)
class FrontDoor:
    limits: Limits
    codec: TextCodec
    generator: Generator
    metrics: Metrics
    load: Load = field(default_factory=lambda: Load(256))
    healthy: Callable[[], bool] = _always_healthy  # whether a request could be served now
    members: Callable[[], Sequence[Registration]] = tuple  # routers, drafters and verifiers as last seen on the board
    replica_id: str = "ingress"
    max_body_bytes: int = 4 * 2**20
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0  # a reader that takes nothing for so long is cancelled
    clock: Callable[[], float] = time.monotonic  # s, for durations
    now_s: Callable[[], float] = time.time  # s since 1970, for `created`
    new_key: Callable[[], int] = lambda: secrets.randbits(64)  # of requests without a seed

    def new_session_id(self) -> str:
        """Never reused, and says which ingress replica owns the session."""
        return f"{self.replica_id}-{uuid.uuid4().hex}"

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(self.codec.encode, text, add_special_tokens)
        return self.codec.encode(text, add_special_tokens)
