"""One generation seen as text: opened, read burst by burst, and released however the reading ends.

Knows nothing of HTTP or of the two OpenAI dialects. The invariant: every session that was opened is finished by the
router, cut by `finish`, or given up by `abandon`.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.protocol.errors import OutriderError, ProtocolError
from cluster.protocol.messages import Committed
from router.generation import Generation
from router.http.front_door import FrontDoor
from router.http.logprobs import TokenLogprob, logprobs_of, prompt_logprobs_of
from router.http.output_text import OutputText
from router.http.release import to_the_end
from router.http.stop_strings import StopStrings
from router.http.tally import Tally
from router.http.validate import PreparedRequest


@dataclass(frozen=True, slots=True)
class Piece:
    """What one burst adds: text that may be shown, the tokens that count by now and were not handed out before, and
    their log-probabilities when the request asks for them."""

    text: str
    logprobs: Sequence[TokenLogprob] = ()
    token_ids: Sequence[int] = ()


class Answer:
    """The `choice`-th answer of a request. Iterate over `pieces` once; `finish_reason` is set with the last one."""

    def __init__(self, door: FrontDoor, request: PreparedRequest, choice: int = 0) -> None:
        self._door = door
        self._request = request
        self._sampling = replace(request.sampling, choice=choice)
        self._text = OutputText(
            door.codec.detokenizer(request.skip_special_tokens),
            StopStrings(request.stops),
            request.include_stop,
            request.sampling.min_tokens,
        )
        self._token_ids: list[int] = []  # every token received
        self._logprobs: list[TokenLogprob] = []  # of every token received, when the request asks for them
        self._handed = 0  # tokens handed out
        self.prompt_logprobs: list[TokenLogprob] = []  # of every token of the prompt, when the request asks for them
        self.tally = Tally()
        self._received = 0  # output tokens
        self._started_s = self._last_s = door.clock()
        self._ttft_s = 0.0
        self._generation: Generation | None = None
        self._aborted = asyncio.Event()
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None  # the stop string or stop token id; None for the model's own end

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """One piece a burst, empty where the burst completed nothing that may be shown. Raises OutriderError."""
        request, door = self._request, self._door
        if self._aborted.is_set():
            self.finish_reason = "abort"
            return
        generation = door.generator.generate(door.new_session_id(), request.prompt, self._sampling, request.speculation)
        self._generation = generation
        door.metrics.request_started(len(request.prompt))
        outcome = "abort"
        try:
            async for burst in generation:
                yield self._take(burst)
                if self.finish_reason is not None:
                    break
            else:
                if not self._aborted.is_set():
                    raise ProtocolError("the generation ended without a finish reason")
                self.finish_reason = "abort"
            if self._text.stop is not None:
                await generation.finish(len(request.prompt) + self._text.kept_tokens)
            outcome = self.finish_reason
        except Exception:
            outcome = "error"
            raise
        finally:
            door.metrics.request_finished(outcome, self._received > 0, door.clock() - self._started_s)
            if outcome in ("abort", "error"):
                await to_the_end(generation.abandon())

    async def abort(self) -> None:
        """End it here, from outside its reading: `pieces` ends with finish_reason "abort". What was handed out counts.
        Harmless once it has ended."""
        self._aborted.set()
        if self._generation is not None:
            await self._generation.abandon()

    @property
    def prompt_tokens(self) -> int:
        return len(self._request.prompt)

    @property
    def completion_tokens(self) -> int:
        """What counts so far: tokens kept, never those behind a stop string."""
        return self._text.kept_tokens

    def draft_details(self) -> dict[str, int]:
        return self.tally.details()

    def report(self) -> dict[str, Any]:
        """The answer's own metrics, for requests that ask for them."""
        generation_s = self._last_s - self._started_s - self._ttft_s
        return {
            "speculative_decoding": self.tally.report(),
            "rounds": self.tally.rounds(),
            "time_to_first_token_ms": 1e3 * self._ttft_s,
            "generation_time_ms": 1e3 * generation_s,
            "mean_itl_ms": 1e3 * generation_s / max(1, self._received - 1),
        }

    def _take(self, burst: Committed) -> Piece:
        if burst.finish_reason in ("error", "preempted"):
            raise OutriderError(burst.error or f"the generation ended as {burst.finish_reason}")
        expected = len(self._request.prompt) + self._received
        if burst.base_len != expected:
            raise ProtocolError(f"burst extends {burst.base_len} tokens, the answer has {expected}")
        opening = self._opening(burst) if self._received == 0 else Piece("")
        self._observe(burst)
        if self._request.only_prompt:
            self.finish_reason = "length"
            return opening
        before = self._text.kept_tokens
        text = self._show(burst)
        self.tally.add(burst.stats, self._text.kept_tokens - before if self._text.stop else len(burst.token_ids))
        token_ids, logprobs = self._hand_out(burst)
        return Piece(opening.text + text, [*opening.logprobs, *logprobs], token_ids)

    def _opening(self, burst: Committed) -> Piece:
        """What comes before the first token: the prompt, if it is to be echoed."""
        request = self._request
        if request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = prompt_logprobs_of(burst, request.prompt)
        if request.echo is None:
            return Piece("")
        best = request.sampling.logprobs
        if best is None:
            return Piece(request.echo)
        offsets = self._door.codec.offsets(request.prompt.tolist(), request.echo)
        named = zip(self.prompt_logprobs, offsets, strict=True)
        return Piece(request.echo, [replace(t, best=t.best[:best], offset=offset) for t, offset in named])

    def _hand_out(self, burst: Committed) -> tuple[Sequence[int], Sequence[TokenLogprob]]:
        """The tokens that count by now and were not handed out before, with what is known of them."""
        self._token_ids += burst.token_ids.tolist()
        self._logprobs += logprobs_of(burst)
        now = slice(self._handed, self._text.kept_tokens)
        self._handed = now.stop
        echoed = len(self._request.echo or "")
        named = enumerate(self._logprobs[now], now.start)
        return self._token_ids[now], [replace(t, offset=echoed + self._text.character(i)) for i, t in named]

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


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of all answers of one request together; they share the prompt."""
    prompt, completion = answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers)
    details: Counter[str] = Counter()
    for answer in answers:
        details.update(answer.draft_details())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": dict(details),
    }
