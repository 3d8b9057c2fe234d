"""A seed pins the text, whatever speculates; without one, texts vary.

That a seeded text is the same with and without speculation is promised by servers whose sampler is coupled (ours, known
by its `speculation` field). Others may draw differently from the same law: for them that cell is not a violation.
"""

from functools import partial

from cluster.check.answer import Answer, Ask
from cluster.check.compare import difference, same
from cluster.check.errors import NotCheckable
from cluster.check.finding import Cell, Verdict, drafts_seen, passed, violation, worst
from cluster.check.prompts import STORY, YES_NO
from cluster.check.together import together
from cluster.check.twins import DEPTHS, Arm, Twins

SEEDS = (1, 42, 2**31 - 1)
MANY = 6  # texts that must not all be equal
ASKS = tuple(Ask(prompt, 24, temperature=0.9, extra={"top_p": 0.95}) for prompt in (STORY, YES_NO))


class Seeds:
    name = "seeds"

    async def cells(self, twins: Twins) -> list[Cell]:
        return [
            Cell("same seed twice", partial(self._twice, twins)),
            Cell("with and without speculation", partial(self._twins, twins)),
            Cell(f"depths {', '.join(map(str, DEPTHS))}", partial(self._depths, twins)),
            Cell("different seeds", partial(self._different, twins)),
            Cell("no seed", partial(self._unseeded, twins)),
        ]

    async def _twice(self, twins: Twins) -> Verdict:
        verdicts, seen = [], []
        for ask in ASKS:
            for seed in SEEDS:
                first, again = [await twins.fast.ask(ask.having(seed=seed)) for _ in range(2)]
                words = difference(first, again, ("first", "again"))
                verdicts.append(violation(f"seed {seed}: {words}", prompt=ask.prompt) if words else passed())
                seen += [first, again]
        return _with_drafts(worst(verdicts), seen)

    async def _twins(self, twins: Twins) -> Verdict:
        verdicts, seen = [], []
        for ask in ASKS:
            for seed in SEEDS:
                fast, plain = await twins.both(ask.having(seed=seed))
                verdicts.append(same(fast, plain))
                seen.append(fast)
        verdict = worst(verdicts)
        if verdict.outcome == "violation" and not twins.controlled:
            raise NotCheckable("texts differ, and this server does not promise otherwise: the sampling law decides")
        return _with_drafts(verdict, seen)

    async def _depths(self, twins: Twins) -> Verdict:
        verdicts, seen = [], []
        for ask in ASKS:
            seeded = ask.having(seed=SEEDS[1])
            answers = [await twins.fast.ask(seeded, max_depth=depth) for depth in DEPTHS]
            for depth, answer in zip(DEPTHS[1:], answers[1:], strict=True):
                words = difference(answers[0], answer, (f"at depth {DEPTHS[0]}", f"at depth {depth}"))
                verdicts.append(violation(words, prompt=ask.prompt) if words else passed())
            seen += answers
        return _with_drafts(worst(verdicts), seen)

    async def _different(self, twins: Twins) -> Verdict:
        asks = [ASKS[0].having(seed=seed) for seed in range(100, 100 + MANY)]
        return await _varied(twins, asks, f"{MANY} different seeds")

    async def _unseeded(self, twins: Twins) -> Verdict:
        return await _varied(twins, [ASKS[0]] * MANY, f"{MANY} requests without a seed")


def _with_drafts(verdict: Verdict, seen: list[Answer]) -> Verdict:
    return verdict if verdict.outcome == "violation" else passed(drafts_seen(seen, "drafted"))


async def _varied(twins: Twins, asks: list[Ask], what: str) -> Verdict:
    """At least two texts. A prompt with only one likely answer would show the same without speculation."""
    texts = await _texts(twins.fast, asks)
    if len(texts) > 1:
        return passed(f"{len(texts)} texts of {len(asks)}")
    if twins.other is not None and len(await _texts(twins.other, asks)) == 1:
        raise NotCheckable(f"{what} give one text without speculation too: this model leaves no choice")
    return violation(f"{what} all give the same text", text=next(iter(texts)))


async def _texts(arm: Arm, asks: list[Ask]) -> set[str]:
    return {answer.text for answer in await together(arm.ask(ask) for ask in asks)}
