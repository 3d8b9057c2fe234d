"""What a load needs of a server: facts about itself, and one streamed answer at a time. Knows no protocol."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.check.answer import Ask
from cluster.protocol.errors import OutriderError


class AskFailed(OutriderError):
    """One request had no whole answer. Failures are counted by `kind`; the message is the detail."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class CouldNotRun(OutriderError):
    """Nothing can be measured: no server, no model, or a request that it refuses."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a server says of a whole answer. None = it did not say."""

    prompt_tokens: int | None = None
    tokens: int | None = None
    accepted: int | None = None  # draft tokens that became part of the answer
    rejected: int | None = None
    rounds: int | None = None  # with draft tokens


class Endpoint(Protocol):
    async def connect(self) -> Mapping[str, Any]:
        """Facts for the report. Raises CouldNotRun."""
        ...

    async def ask(self, ask: Ask, on_tokens: Callable[[], None]) -> Told:
        """One whole answer; `on_tokens` is called whenever a part of it has come. Raises AskFailed.

        Waits as long as it must: the caller cancels what takes too long.
        """
        ...

    async def close(self) -> None: ...
