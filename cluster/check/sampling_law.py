"""Short texts drawn with speculation follow the law of those drawn without.

Two samples of the same size, drawn in alternation; the cells of the test are whole texts of DRAW_TOKENS tokens, so
that the joint law of consecutive tokens is compared, not only each token's own. The probability that an exact server
fails anywhere in this check is at most FALSE_ALARM (Bonferroni over its cells); a small biased one may pass, and the
table says which shift would have been seen.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.check.answer import Answer, Ask
from cluster.check.budget import Budget
from cluster.check.chi_square import REST, Homogeneity, detectable_shift, two_sample
from cluster.check.endpoint import CONCURRENCY
from cluster.check.errors import NotCheckable, OutOfTime
from cluster.check.finding import Cell, OnDone, Verdict, drafts_seen, passed, violation
from cluster.check.prompts import YES_NO
from cluster.check.together import together
from cluster.check.twins import Twins

FALSE_ALARM = 1e-3
# The first token comes with the prefill, and a last single token is not worth a draft: three are the fewest among
# which a draft can be accepted.
DRAW_TOKENS = 3
MIN_DRAWS = 50  # of each sample; fewer tell nothing worth a verdict
NAME = "sampling law"


@dataclass(frozen=True, slots=True)
class Variant:
    """How texts are drawn; `speculation` goes to the side with speculation only."""

    name: str
    temperature: float
    extra: Mapping[str, Any] = field(default_factory=dict)
    speculation: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Draws:
    """Grows pair by pair, so that both samples always have the same size."""

    fast: list[Answer] = field(default_factory=list)
    plain: list[Answer] = field(default_factory=list)

    def test(self) -> tuple[Homogeneity, int]:
        """(test, characters of the texts that it looked at).

        Where nearly every text is different, their beginnings are compared: as many characters as leave half of all
        draws in cells of their own. That looks at both samples as one, so it leaves the test's level alone.
        """
        longest = max(1, *(len(answer.text) for answer in (*self.fast, *self.plain)))
        for chars in range(longest, 0, -1):
            test = two_sample(*(Counter(a.text[:chars] for a in sample) for sample in (self.fast, self.plain)))
            if sum(test.cells.get(REST, ())) <= len(self.fast):
                break
        return test, chars


class SamplingLaw:
    """`draws` pairs for each variant, or as many as the time allows."""

    name = NAME

    def __init__(self, draws: int, budget: Budget, on_draw: OnDone) -> None:
        self._draws = draws
        self._budget = budget
        self._on_draw = on_draw

    def variants(self, twins: Twins) -> list[Variant]:
        common = [Variant("temperature 1", 1.0), Variant("temperature 0.7, top_p 0.9", 0.7, {"top_p": 0.9})]
        rules = twins.acceptance_rules
        return common + [Variant(f"temperature 1, {rule} rule", 1.0, {}, {"acceptance": rule}) for rule in rules]

    async def cells(self, twins: Twins) -> list[Cell]:
        """One after the other, each with an equal part of the time that is left."""
        variants = self.variants(twins)
        turns = asyncio.Lock()  # fair: cells get it in their order
        waiting = itertools.count(len(variants), -1)

        def cell(variant: Variant) -> Cell:
            async def judge() -> Verdict:
                async with turns:
                    with self._budget.share(1 / next(waiting)):
                        return await self._variant(twins, variant, FALSE_ALARM / len(variants))

            return Cell(variant.name, judge)

        return [cell(variant) for variant in variants]

    async def _variant(self, twins: Twins, variant: Variant, level: float) -> Verdict:
        ask = await _with_all_tokens_allowed(twins, Ask(YES_NO, DRAW_TOKENS, variant.temperature, variant.extra))
        draws = await self._draw(twins, ask, variant)
        n = len(draws.fast)
        if n < MIN_DRAWS:
            raise NotCheckable(f"only {n} draws in the time there was; at least {MIN_DRAWS} are needed")
        return _verdict(draws, level)

    async def _draw(self, twins: Twins, ask: Ask, variant: Variant) -> Draws:
        draws, plain = Draws(), twins.plain
        numbers = iter(range(self._draws))

        async def draw_pairs() -> None:
            for _ in numbers:
                try:
                    pair = await twins.fast.ask(ask, **variant.speculation), await plain.ask(ask)
                except OutOfTime:
                    return
                draws.fast.append(pair[0])
                draws.plain.append(pair[1])
                self._on_draw(variant.name, len(draws.fast), self._draws)

        await together(draw_pairs() for _ in range(CONCURRENCY))
        return draws


async def _with_all_tokens_allowed(twins: Twins, ask: Ask) -> Ask:
    """Two servers may have different defaults for top_k and top_p: set them, where they can be set, on both."""
    for name, off in (("top_p", 1.0), ("top_k", -1)):
        if name in ask.extra:
            continue
        wider = ask.having(**{name: off})
        try:
            await twins.both(wider)
        except NotCheckable:
            continue
        ask = wider
    return ask


def _verdict(draws: Draws, level: float) -> Verdict:
    (test, chars), n = draws.test(), len(draws.fast)
    if test.freedom == 0:
        raise NotCheckable(f"{n} draws fall into one cell: this model's law is too sharp or too flat here")
    seen = drafts_seen(draws.fast, "drafted")
    shift = detectable_shift(n, test.freedom, level)
    detail = (
        f"{n} + {n} draws in {test.freedom + 1} cells of up to {chars} characters: chi-square {test.statistic:.1f}, "
        f"p = {test.p_value:.2g} (fails below {level:.2g}; a shift of {shift:.2f} is seen 9 times in 10); {seen}"
    )
    build: Callable[..., Verdict] = violation if test.p_value < level else passed
    return build(detail, counts=test.cells, statistic=test.statistic, p_value=test.p_value, level=level, draws=n)
