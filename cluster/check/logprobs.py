"""Log-probabilities are the target's own, for every token, whoever proposed it.

Compared token by token with those of the same request without speculation. Values of a drafter, zeros for accepted
tokens, or missing entries show here.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from cluster.check.answer import Answer, Ask, TokenLogprob
from cluster.check.compare import same_greedy
from cluster.check.errors import NotCheckable
from cluster.check.finding import Cell, Verdict, drafts_seen, passed, violation, worst
from cluster.check.prompts import COPY, SHORT_ANSWER
from cluster.check.twins import Twins

ASKS = {
    "completion, copied paragraph": Ask(COPY, 32, logprobs=True),
    "chat": Ask(SHORT_ANSWER, 32, logprobs=True),
    "streamed": Ask(COPY, 32, logprobs=True, stream=True),
    "sampled, seeded": Ask(COPY, 32, temperature=0.8, logprobs=True, extra={"seed": 42}),
}


class Logprobs:
    """`tolerance`: how far two values of the same token may be apart."""

    name = "logprobs"

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance

    async def cells(self, twins: Twins) -> list[Cell]:
        values = [Cell(name, partial(self._values, twins, ask)) for name, ask in ASKS.items()]
        read = Cell("read back as a prompt", partial(self._read_back, twins))
        return [*values, read, Cell("asking changes nothing", partial(self._same_text, twins))]

    async def _values(self, twins: Twins, ask: Ask) -> Verdict:
        fast, plain = await twins.both(ask)
        if not plain.logprobs:
            raise NotCheckable("the server gives no log-probabilities")
        verdict = worst([_equal(fast.logprobs or (), plain.logprobs, self._tolerance), _complete(fast)])
        if verdict.outcome == "violation" or ask.prompt != COPY:
            return verdict
        return passed(f"{verdict.detail}; {drafts_seen([fast], 'drafted')}")

    async def _read_back(self, twins: Twins) -> Verdict:
        """A token has the same value where it was generated and where the target reads it."""
        written = await twins.fast.ask(ASKS["completion, copied paragraph"])
        if not written.logprobs:
            raise NotCheckable("the server gives no log-probabilities")
        whole = COPY + written.text
        read = await twins.fast.ask(Ask(whole, 1, logprobs=True, extra={"echo": True}))
        if not read.text.startswith(whole) or not read.logprobs:
            raise NotCheckable("the server does not echo prompts with their log-probabilities")
        ours = [entry for entry in written.logprobs if entry.token]
        theirs = read.logprobs[-1 - len(ours) : -1]
        if [entry.token for entry in ours] != [entry.token for entry in theirs]:
            raise NotCheckable("the text is cut into other tokens where it is read")
        return _equal(ours, theirs, self._tolerance, ("where it was written", "where it is read"))

    async def _same_text(self, twins: Twins) -> Verdict:
        ask = ASKS["completion, copied paragraph"]
        silent = replace(ask, logprobs=False)
        asked, plain = await twins.fast.ask(ask), await twins.plain.ask(silent)
        return await same_greedy(twins, silent, asked, plain, self._tolerance)


def _complete(answer: Answer) -> Verdict:
    """One entry for every token. The token that ended the answer may have none."""
    entries = len(answer.logprobs or ())
    if answer.tokens is not None and not answer.tokens - (answer.finish_reason == "stop") <= entries <= answer.tokens:
        return violation(f"{entries} log-probabilities for {answer.tokens} completion tokens with speculation")
    return passed()


def _equal(
    fast: Sequence[TokenLogprob],
    plain: Sequence[TokenLogprob],
    tolerance: float,
    sides: tuple[str, str] = ("with speculation", "without"),
) -> Verdict:
    """Up to the first token in which the texts differ, which greedy parity and seeds judge."""
    furthest, compared = 0.0, 0
    for place, (ours, theirs) in enumerate(zip(fast, plain, strict=False)):
        if ours.token != theirs.token:
            break
        compared += 1
        apart = max(abs(a - b) for a, b in _pairs(ours, theirs))
        furthest = max(furthest, apart)
        if not apart <= tolerance:  # also when it is NaN
            detail = (
                f"token {place} {ours.token!r}: {ours.logprob:.4f} {sides[0]}, {theirs.logprob:.4f} {sides[1]}; "
                f"{apart:.2g} apart (tolerance {tolerance:g})"
            )
            return violation(detail, fast=list(map(_plain, fast)), plain=list(map(_plain, plain)))
    if not compared:
        raise NotCheckable("the texts differ from the first token: see greedy parity and seeds")
    return passed(f"{compared} tokens, at most {furthest:.1g} apart")


def _pairs(ours: TokenLogprob, theirs: TokenLogprob) -> list[tuple[float, float]]:
    """The chosen token and the best alternatives that both name."""
    return [(ours.logprob, theirs.logprob)] + [
        (ours.top[t], theirs.top[t]) for t in ours.top.keys() & theirs.top.keys()
    ]


def _plain(entry: TokenLogprob) -> tuple[str, float]:
    return entry.token, entry.logprob
