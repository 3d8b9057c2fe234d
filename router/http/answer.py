"""One generation seen as text: opened, read burst by burst, and released however the reading ends.

Knows nothing of HTTP or of the two OpenAI dialects. The invariant: every session that was opened is finished by the
router, cut by `finish`, or given up by `abandon`.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from cluster.protocol.errors import OutriderError, ProtocolError
from cluster.protocol.messages import Committed
from router.http.front_door import FrontDoor
from router.http.output_text import OutputText
from router.http.stop_strings import StopStrings
from router.http.tally import Tally
from router.http.validate import PreparedRequest


class Answer:
    """Iterate over `texts` once; `finish_reason` is set with the last one."""

    def __init__(self, door: FrontDoor, request: PreparedRequest) -> None:
        self._door = door
        self._request = request
        self._text = OutputText(
            door.codec.detokenizer(request.skip_special_tokens), StopStrings(request.stops), request.include_stop
        )
        self._tally = Tally()
        self._received = 0  # output tokens
        self._started_s = self._last_s = door.clock()
        self._ttft_s = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None  # the stop string or stop token id; None for the model's own end

    async def texts(self) -> AsyncGenerator[str, None]:
        """One text a burst, empty where the burst completed nothing that may be shown. Raises OutriderError."""
        request, door = self._request, self._door
        with door.load.entered():
            generation = door.generator.generate(
                door.new_session_id(), request.prompt, request.sampling, request.speculation
            )
            door.metrics.request_started(len(request.prompt))
            outcome = "abort"
            try:
                async for burst in generation:
                    yield self._take(burst)
                    if self.finish_reason is not None:
                        break
                else:
                    raise ProtocolError("the generation ended without a finish reason")
                if self._text.stop is not None:
                    await generation.finish(len(request.prompt) + self._text.kept_tokens)
                outcome = self.finish_reason
            except Exception:
                outcome = "error"
                raise
            finally:
                door.metrics.request_finished(outcome, self._received > 0, door.clock() - self._started_s)
                if outcome in ("abort", "error"):
                    await _to_the_end(generation.abandon())

    def usage(self) -> dict[str, Any]:
        """What counts so far: tokens kept, never those behind a stop string."""
        prompt, completion = len(self._request.prompt), self._text.kept_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": self._tally.details(),
        }

    def report(self) -> dict[str, Any]:
        """The answer's own metrics, for requests that ask for them."""
        generation_s = self._last_s - self._started_s - self._ttft_s
        return {
            "speculative_decoding": self._tally.report(),
            "rounds": self._tally.rounds(),
            "time_to_first_token_ms": 1e3 * self._ttft_s,
            "generation_time_ms": 1e3 * generation_s,
            "mean_itl_ms": 1e3 * generation_s / max(1, self._received - 1),
        }

    def _take(self, burst: Committed) -> str:
        if burst.finish_reason in ("error", "preempted"):
            raise OutriderError(burst.error or f"the generation ended as {burst.finish_reason}")
        expected = len(self._request.prompt) + self._received
        if burst.base_len != expected:
            raise ProtocolError(f"burst extends {burst.base_len} tokens, the answer has {expected}")
        self._observe(burst)
        before = self._text.kept_tokens
        text = self._show(burst)
        self._tally.add(burst.stats, self._text.kept_tokens - before if self._text.stop else len(burst.token_ids))
        return text

    def _show(self, burst: Committed) -> str:
        token_ids = burst.token_ids.tolist()
        # The token that ended the answer is no part of its text, unless it was asked for like a stop string.
        hidden = token_ids[-1:] if burst.finish_reason == "stop" and not self._request.include_stop else []
        text = self._text.push(token_ids[: len(token_ids) - len(hidden)])
        if hidden:
            self._text.push_silent()
        if burst.finish_reason is not None:
            text += self._text.finish()
            self.finish_reason = burst.finish_reason
            self.stop_reason = self._stop_token(token_ids) if burst.finish_reason == "stop" else None
        if self._text.stop is not None:
            self.finish_reason, self.stop_reason = "stop", self._text.stop
        return text

    def _stop_token(self, token_ids: list[int]) -> int | None:
        return token_ids[-1] if token_ids and token_ids[-1] not in self._door.codec.eos_ids else None

    def _observe(self, burst: Committed) -> None:
        now_s, tokens = self._door.clock(), len(burst.token_ids)
        metrics = self._door.metrics
        if burst.stats is not None:
            metrics.round_verified(burst.stats.drafted, burst.stats.accepted)
        if not tokens:
            return
        if self._received == 0:
            self._ttft_s = now_s - self._started_s
            metrics.first_burst(tokens, self._ttft_s)
        else:
            metrics.next_burst(tokens, now_s - self._last_s)
        self._received += tokens
        self._last_s = now_s


_releases: set[asyncio.Task[None]] = set()  # asyncio itself keeps only weak references


async def _to_the_end(release: Coroutine[Any, Any, None]) -> None:
    """Run `release` even if the caller is cancelled again meanwhile: what it frees is not the caller's."""
    task = asyncio.create_task(release)
    _releases.add(task)
    task.add_done_callback(_releases.discard)
    await asyncio.shield(task)
