"""Greedy text with speculation equals greedy text without: over prompts, lengths, depths, streamed and whole."""

from collections.abc import Sequence
from functools import partial

from cluster.check.answer import Answer, Ask
from cluster.check.compare import difference, same_greedy
from cluster.check.finding import Cell, Verdict, passed, tested, violation, worst
from cluster.check.prompts import COPY, PROMPTS, Prompt
from cluster.check.twins import DEPTHS, Twins

NAME = "greedy parity"


class GreedyParity:
    """`tolerance`: what a near-tie is, as a difference of log-probabilities."""

    name = NAME

    def __init__(self, tolerance: float, prompts: Sequence[Prompt] = PROMPTS) -> None:
        self._tolerance = tolerance
        self._prompts = prompts

    async def cells(self, twins: Twins) -> list[Cell]:
        depths = Cell(f"depths {', '.join(map(str, DEPTHS))}", partial(self._depths, twins))
        return [*(Cell(prompt.name, partial(self._prompt, twins, prompt)) for prompt in self._prompts), depths]

    async def _prompt(self, twins: Twins, prompt: Prompt) -> Verdict:
        ask = Ask(prompt.prompt, prompt.max_tokens)
        fast, plain = await twins.both(ask)
        verdict = await same_greedy(twins, ask, fast, plain, self._tolerance)
        return worst([verdict, await self._streamed(twins, ask, fast, plain)])

    async def _streamed(self, twins: Twins, ask: Ask, fast: Answer, plain: Answer) -> Verdict:
        """The stream says what the whole answer says, unless the two runs fell on two sides of a near-tie."""
        streamed = await twins.fast.ask(Ask(ask.prompt, ask.max_tokens, stream=True))
        words = difference(streamed, fast, ("streamed", "whole"))
        if not words:
            return passed(f"{len(fast.text)} characters in {streamed.pieces} pieces when streamed")
        if not difference(streamed, plain):
            return passed("streamed, it is the text without speculation")
        verdict = await same_greedy(twins, ask, streamed, plain, self._tolerance)
        return verdict if verdict.outcome == "near-tie" else violation(words, streamed=streamed.text, whole=fast.text)

    async def _depths(self, twins: Twins) -> Verdict:
        ask = Ask(COPY, 40)
        plain = await twins.plain.ask(ask)
        answers = [await twins.fast.ask(ask, max_depth=depth) for depth in DEPTHS]
        verdicts = [await same_greedy(twins, ask, fast, plain, self._tolerance) for fast in answers]
        return tested(verdicts, answers, "one text")
