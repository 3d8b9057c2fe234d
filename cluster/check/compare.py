"""Whether two answers are the same, and what a first difference of two greedy answers means.

A greedy difference is a near-tie when the log-probabilities of the server without speculation put the two tokens less
than `tolerance` apart: then rounding decides, and two runs of the same model may differ. Everything else is a
violation, also a difference that cannot be explained because the server gives no log-probabilities.
"""

from cluster.check.answer import Answer, Ask, TokenLogprob
from cluster.check.errors import NotCheckable, OutOfTime, RequestFailed
from cluster.check.finding import Verdict, passed, violation
from cluster.check.twins import Twins

CONTEXT = 12  # characters shown around a difference


def difference(fast: Answer, plain: Answer, names: tuple[str, str] = ("with speculation", "without")) -> str:
    """What differs first, in words; empty when the answers are the same."""
    a, b = names
    if fast.text != plain.text:
        at = common_prefix(fast.text, plain.text)
        return f"text differs from character {at}: {_around(fast.text, at)} {a}, {_around(plain.text, at)} {b}"
    if fast.finish_reason != plain.finish_reason:
        return f"finish_reason {fast.finish_reason!r} {a}, {plain.finish_reason!r} {b}"
    if None not in (fast.tokens, plain.tokens) and fast.tokens != plain.tokens:
        return f"{fast.tokens} completion tokens {a}, {plain.tokens} {b}"
    return ""


def common_prefix(a: str, b: str) -> int:
    """How many characters two texts share from their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def same(fast: Answer, plain: Answer) -> Verdict:
    """A violation unless the answers are the same."""
    if words := difference(fast, plain):
        return violation(words, fast=fast.text, plain=plain.text)
    return passed()


async def same_greedy(twins: Twins, ask: Ask, fast: Answer, plain: Answer, tolerance: float) -> Verdict:
    """As `same`, with a look at the log-probabilities where the texts part."""
    verdict = same(fast, plain)
    if verdict.outcome == "passed" or fast.text == plain.text:
        return verdict
    why, gap = await _explain(twins, ask, tolerance)
    words, data = f"{verdict.detail}; {why}", {**verdict.data, "gap": gap, "prompt": ask.prompt}
    tie = gap is not None and gap < tolerance
    return Verdict("near-tie", words, data) if tie else Verdict("violation", words, data)


async def _explain(twins: Twins, ask: Ask, tolerance: float) -> tuple[str, float | None]:
    """(words, gap between the two tokens where the texts part; None = unresolved)."""
    try:
        fast, plain = await twins.both(Ask(ask.prompt, ask.max_tokens, ask.temperature, ask.extra, logprobs=True))
    except (NotCheckable, OutOfTime, RequestFailed) as reason:
        # The difference has been seen: that it cannot be explained does not undo it.
        return f"unresolved: no log-probabilities ({reason})", None
    if not fast.logprobs or not plain.logprobs:
        return "unresolved: the server gives no log-probabilities", None
    for ours, theirs in zip(fast.logprobs, plain.logprobs, strict=False):
        if ours.token != theirs.token:
            return _gap(ours, theirs, tolerance)
    return "unresolved: it did not come again when log-probabilities were asked for", None


def _gap(fast: TokenLogprob, plain: TokenLogprob, tolerance: float) -> tuple[str, float | None]:
    if fast.token not in plain.top:
        return f"{fast.token!r} is not among the best tokens after that text, {plain.token!r} is", None
    gap = max(plain.top.values()) - plain.top[fast.token]
    word = "a near-tie" if gap < tolerance else "no near-tie"
    return f"{word}: {plain.token!r} leads {fast.token!r} by {gap:.2g} (tolerance {tolerance:g})", gap


def _around(text: str, at: int) -> str:
    return repr(text[max(0, at - CONTEXT) : at + CONTEXT])
