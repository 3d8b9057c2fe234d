"""What the front doors see of everything behind them: open a generation, read committed tokens, finish.

Knows nothing of text. router/client.py implements it over the data plane; tests script it.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from cluster.protocol.messages import Committed, SamplingParams, Speculation, Tokens


class Generation(Protocol):
    """One running generation. Iterate over it for bursts in order; the last burst carries a finish_reason.

    Bursts never overlap and never leave a gap, whatever dies behind the router. Raises Overloaded, Unavailable or
    InvalidRequest instead of the first burst, Unavailable later only when no replica came back in time.
    """

    def __aiter__(self) -> AsyncIterator[Committed]: ...

    async def finish(self, kept_len: int) -> None:
        """Stop here: `kept_len` committed tokens (prompt included) count, e.g. after a stop string. Idempotent; frees
        the session on both pools. Harmless after the last burst."""
        ...

    async def abandon(self) -> None:
        """The reader has gone: nothing more counts. Idempotent; frees the session on both pools."""
        ...


class Generator(Protocol):
    """Opens generations."""

    def generate(
        self, session_id: str, prompt: Tokens, sampling: SamplingParams, speculation: Speculation
    ) -> Generation:
        """Returns at once; nothing is sent before the first iteration."""
        ...
