"""A generation that commits what a script says, for tests of the front doors. It records how it was released."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from cluster.protocol.messages import (
    Committed,
    FinishReason,
    RoundStats,
    SamplingParams,
    Speculation,
    TokenLogprobs,
    Tokens,
    as_tokens,
)


@dataclass(frozen=True)
class Burst:
    """What one round of the script commits, or raises."""

    token_ids: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    drafted: int = 0
    accepted: int = 0
    error: Exception | None = None
    failure: str = ""  # the text of a Committed that ends in "error"
    logprobs: TokenLogprobs | None = None


@dataclass
class ScriptedGeneration:
    """Commits the script; a burst of None waits until it is released. Records how that was done."""

    prompt: Tokens
    sampling: SamplingParams
    speculation: Speculation
    script: Sequence[Burst | None]
    finished: list[int] = field(default_factory=list)
    abandoned: int = 0
    waiting: asyncio.Event = field(default_factory=asyncio.Event)  # set while a burst of None waits
    abandoning: asyncio.Event = field(default_factory=asyncio.Event)  # set when `abandon` is called
    may_abandon: asyncio.Event = field(default_factory=asyncio.Event)  # clear it to make `abandon` wait
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_abandon.set()

    async def __aiter__(self) -> AsyncIterator[Committed]:
        length = len(self.prompt)
        for burst in self.script:
            if burst is None:
                self.waiting.set()
                await self._released.wait()
                return
            if burst.error is not None:
                raise burst.error
            await asyncio.sleep(0)
            stats = RoundStats(burst.drafted, burst.accepted, 1.0, 0.0, 1.0)
            ids = as_tokens(burst.token_ids)
            yield Committed("s", 0, length, ids, burst.finish_reason, stats, burst.failure, burst.logprobs)
            length += len(ids)

    async def finish(self, kept_len: int) -> None:
        self.finished.append(kept_len)
        self._released.set()

    async def abandon(self) -> None:
        self.abandoning.set()
        await self.may_abandon.wait()
        self.abandoned += 1
        self._released.set()


@dataclass
class ScriptedGenerator:
    script: Sequence[Burst | None] = ()
    opened: list[ScriptedGeneration] = field(default_factory=list)
    session_ids: list[str] = field(default_factory=list)

    def generate(
        self, session_id: str, prompt: Tokens, sampling: SamplingParams, speculation: Speculation
    ) -> ScriptedGeneration:
        self.session_ids.append(session_id)
        self.opened.append(ScriptedGeneration(prompt, sampling, speculation, self.script))
        return self.opened[-1]
