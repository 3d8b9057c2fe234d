"""Parameters that work token by token also work inside a block of accepted drafts.

Each is tried on a text that copies its prompt, where whole blocks are accepted, with speculation and without. What is
expected comes from the same server's greedy text without the parameter: a stop string cut out of its middle, its own
sixth token banned. A parameter that changes nothing, or that no accepted draft met, has not been tested.
"""

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

from cluster.check.answer import Answer, Ask
from cluster.check.compare import same, same_greedy
from cluster.check.errors import NotCheckable
from cluster.check.finding import Cell, Verdict, passed, tested, violation, worst
from cluster.check.prompts import COPY, SHORT_ANSWER
from cluster.check.twins import Twins

Value = TypeVar("Value")

LENGTH = 40  # tokens of the copied text
LIMITS = (1, 2, 3, 4, 5, 8, 9)  # max_tokens: around the depths in use, and one token more
NATURAL_END = 128  # tokens within which a short answer should end by itself
BAN = -100.0
# Strengths in the order tried: one that changes the text, but not so much that no copied block is accepted.
PENALTIES = {
    "presence_penalty": (1.0, 2.0, -2.0),
    "frequency_penalty": (1.0, 0.5),
    "repetition_penalty": (1.3, 1.15, 1.08, 1.04),
}
MILD = {"presence_penalty": 0.2, "frequency_penalty": 0.2, "repetition_penalty": 1.05}
SEEDS = range(42, 48)  # tried in turn until an accepted draft met all parameters


class BlockParameters:
    """`tolerance`: as in greedy_parity.py."""

    name = "parameters in blocks"

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance

    async def cells(self, twins: Twins) -> list[Cell]:
        base = await (twins.other or twins.fast).ask(Ask(COPY, LENGTH))
        return [
            Cell("stop strings", partial(self._stop_strings, twins, base, False)),
            Cell("stop strings, streamed", partial(self._stop_strings, twins, base, True)),
            Cell("max_tokens", partial(self._max_tokens, twins)),
            Cell("end of text", partial(self._natural_end, twins)),
            Cell("ignore_eos", partial(self._ignore_eos, twins)),
            Cell("min_tokens", partial(self._min_tokens, twins)),
            Cell("stop_token_ids", partial(self._stop_token, twins, base)),
            Cell("logit_bias", partial(self._logit_bias, twins, base)),
            *(Cell(name, partial(self._penalty, twins, base, name)) for name in PENALTIES),
            Cell("all together, seeded", partial(self._together, twins, base)),
        ]

    async def _stop_strings(self, twins: Twins, base: Answer, stream: bool) -> Verdict:
        verdicts, seen = [], []
        for stop in stops_within(base.text):
            ask = Ask(COPY, LENGTH, extra={"stop": [stop]}, stream=stream)
            fast, plain = await twins.fast.ask(ask), await twins.other.ask(ask) if twins.other else None
            verdicts.append(_stopped(fast, stop))
            if plain is not None:
                verdicts.append(await same_greedy(twins, ask, fast, plain, self._tolerance))
            seen.append(fast)
        return tested(verdicts, seen, f"{len(seen)} stop strings")

    async def _max_tokens(self, twins: Twins) -> Verdict:
        """An answer that is cut has exactly so many tokens; only a stop of its own may make it shorter."""
        verdicts, seen = [], []
        for limit in LIMITS:
            ask = Ask(COPY, limit)
            fast, plain = await twins.fast.ask(ask), await twins.other.ask(ask) if twins.other else None
            verdicts.append(within_limit(fast, limit))
            if plain is not None:
                verdicts.append(await same_greedy(twins, ask, fast, plain, self._tolerance))
            seen.append(fast)
        return tested(verdicts, seen, f"max_tokens {', '.join(map(str, LIMITS))}")

    async def _natural_end(self, twins: Twins) -> Verdict:
        ask = Ask(SHORT_ANSWER, NATURAL_END)
        fast, plain = await twins.both(ask)
        length = _needs_end(plain)
        verdict = await same_greedy(twins, ask, fast, plain, self._tolerance)
        return worst([verdict, passed(f"ends by itself after {length} tokens")])

    async def _ignore_eos(self, twins: Twins) -> Verdict:
        natural = await twins.plain.ask(Ask(SHORT_ANSWER, NATURAL_END))
        length = _needs_end(natural) + 8
        ask = Ask(SHORT_ANSWER, length, extra={"ignore_eos": True})
        fast, plain = await twins.both(ask)
        verdicts = [within_limit(fast, length), await same_greedy(twins, ask, fast, plain, self._tolerance)]
        verdict = _with_effect(worst(verdicts), plain, natural, "ignore_eos")
        return worst([verdict, passed(f"{length} tokens")])

    async def _min_tokens(self, twins: Twins) -> Verdict:
        natural = await twins.plain.ask(Ask(SHORT_ANSWER, NATURAL_END))
        least = _needs_end(natural) + 8
        fast, plain = await twins.both(Ask(SHORT_ANSWER, least + 16, extra={"min_tokens": least}))
        if fast.tokens is not None and plain.tokens is not None and fast.tokens < least <= plain.tokens:
            return violation(f"{fast.tokens} tokens, min_tokens was {least}", fast=fast.text)
        verdict = _with_effect(same(fast, plain), plain, natural, "min_tokens")
        return worst([verdict, passed(f"at least {least} tokens")])

    async def _stop_token(self, twins: Twins, base: Answer) -> Verdict:
        token = await _token_within(twins, base)
        fast, plain = await twins.both(Ask(COPY, LENGTH, extra={"stop_token_ids": [token]}))
        verdict = _with_effect(same(fast, plain), plain, base, "stop_token_ids")
        return tested([verdict], [fast], f"token {token}, {fast.tokens} tokens")

    async def _logit_bias(self, twins: Twins, base: Answer) -> Verdict:
        token = await _token_within(twins, base)
        fast, plain = await twins.both(Ask(COPY, LENGTH, extra={"logit_bias": {str(token): BAN}}))
        verdict = _with_effect(same(fast, plain), plain, base, "logit_bias")
        return tested([verdict], [fast], f"token {token} banned")

    async def _penalty(self, twins: Twins, base: Answer, name: str) -> Verdict:
        async def with_strength(value: float) -> Verdict:
            fast, plain = await twins.both(Ask(COPY, LENGTH, extra={name: value}))
            return tested([_with_effect(same(fast, plain), plain, base, name)], [fast], f"{name} {value:g}")

        return await _first_checkable(with_strength, PENALTIES[name])

    async def _together(self, twins: Twins, base: Answer) -> Verdict:
        if not twins.controlled:
            raise NotCheckable("this server does not promise the same seeded text with and without speculation")
        token = await _token_within(twins, base)
        extra = {"top_p": 0.9, "logit_bias": {str(token): BAN}, "min_tokens": 8, "stop": ["\n\n\n", "zebra"], **MILD}

        async def with_seed(seed: int) -> Verdict:
            ask = Ask(COPY, LENGTH, temperature=0.8, extra={"seed": seed, **extra})
            fast, plain = await twins.both(ask)
            return tested([same(fast, plain)], [fast], f"{len(ask.extra)} parameters")

        return await _first_checkable(with_seed, SEEDS)


async def _first_checkable(attempt: Callable[[Value], Awaitable[Verdict]], values: Iterable[Value]) -> Verdict:
    """The verdict of the first value that puts the parameter to the test. Raises NotCheckable when none does."""
    reason = NotCheckable("no value to try")
    for value in values:
        try:
            return await attempt(value)
        except NotCheckable as why:
            reason = why
    raise reason


def stops_within(text: str, wanted: int = 3) -> list[str]:
    """Pieces of `text` that occur first at about a quarter, a half and three quarters of it."""
    stops = []
    for part in range(1, wanted + 1):
        start = part * len(text) // (wanted + 1)
        if (stop := _first_at(text, start)) is not None and stop not in stops:
            stops.append(stop)
    if not stops:
        raise NotCheckable("the text repeats itself too much to choose a stop string within it")
    return stops


def _first_at(text: str, start: int) -> str | None:
    """The shortest piece of 3 to 12 characters at `start` or a little later that occurs nowhere before."""
    for begin in range(start, min(start + 24, len(text) - 12)):
        for size in range(3, 13):
            piece = text[begin : begin + size]
            if text.find(piece) == begin and piece.strip() == piece:
                return piece
    return None


def _stopped(answer: Answer, stop: str) -> Verdict:
    if stop in answer.text:
        return violation(f"text goes on past the stop string {stop!r}", fast=answer.text)
    return passed()


def within_limit(answer: Answer, limit: int) -> Verdict:
    if answer.tokens is not None and answer.tokens > limit:
        return violation(f"{answer.tokens} completion tokens, max_tokens was {limit}", fast=answer.text)
    if answer.finish_reason == "length" and answer.tokens not in (None, limit):
        return violation(f"finish_reason 'length' after {answer.tokens} tokens, max_tokens was {limit}")
    return passed()


def _needs_end(natural: Answer) -> int:
    if natural.finish_reason != "stop" or natural.tokens is None:
        raise NotCheckable(f"the model did not end by itself within {NATURAL_END} tokens, or does not count them")
    return natural.tokens


def _with_effect(verdict: Verdict, plain: Answer, without: Answer, name: str) -> Verdict:
    """Equality is no pass where the parameter does nothing without speculation either."""
    if verdict.outcome == "passed" and plain.text == without.text:
        raise NotCheckable(f"{name} changes nothing without speculation either: nothing to compare")
    return verdict


async def _token_within(twins: Twins, base: Answer) -> int:
    """A token of the base text, from a little way in, that does not occur before."""
    tokens = await twins.fast.endpoint.token_ids(base.text)
    fresh = [token for i, token in enumerate(tokens) if i >= 5 and token not in tokens[:i]]
    if not fresh:
        raise NotCheckable("the text has too few different tokens")
    return fresh[0]
