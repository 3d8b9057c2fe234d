"""Usage counts the tokens of the answer: not rounds, not drafts, not what lies behind a stop string.

Counted again from what can be seen: the limit that was reached, the server's own tokenizer, the pieces of a stream.
"""

from functools import partial

from cluster.check.answer import Answer, Ask, Usage
from cluster.check.block_parameters import stops_within
from cluster.check.errors import NotCheckable
from cluster.check.finding import Cell, Verdict, passed, violation
from cluster.check.prompts import COPY
from cluster.check.twins import Arm, Twins

LENGTH = 40


class UsageCounts:
    name = "usage"

    async def cells(self, twins: Twins) -> list[Cell]:
        return [
            Cell("whole", partial(self._counted, twins, Ask(COPY, LENGTH))),
            Cell("streamed", partial(self._counted, twins, Ask(COPY, LENGTH, stream=True))),
            Cell("cut by a stop string", partial(self._cut, twins)),
        ]

    async def _counted(self, twins: Twins, ask: Ask) -> Verdict:
        answer = await twins.fast.ask(ask)
        usage = _needs_usage(answer)
        if words := await _wrong(usage, answer, ask, twins.fast):
            return violation(words, text=answer.text)
        if twins.other is not None:
            plain = _needs_usage(await twins.other.ask(ask))
            if plain.prompt_tokens != usage.prompt_tokens:
                return violation(f"{usage.prompt_tokens} prompt tokens, {plain.prompt_tokens} without speculation")
        pieces = f" in {answer.pieces} pieces" if ask.stream else ""
        return passed(f"{usage.completion_tokens} tokens{pieces} after {usage.prompt_tokens} of the prompt")

    async def _cut(self, twins: Twins) -> Verdict:
        """The tokens behind the stop string do not count, though their block was accepted."""
        base = await twins.fast.ask(Ask(COPY, LENGTH))
        ask = Ask(COPY, LENGTH, extra={"stop": stops_within(base.text)[:1]})
        return await self._counted(twins, ask)


async def _wrong(usage: Usage, answer: Answer, ask: Ask, arm: Arm) -> str:
    """What is wrong with the counts; empty when nothing is."""
    counted = usage.completion_tokens
    if usage.total_tokens != usage.prompt_tokens + counted:
        return f"total_tokens {usage.total_tokens} is not {usage.prompt_tokens} + {counted}"
    if answer.pieces > counted:
        return f"{answer.pieces} pieces of text came, but usage counts {counted} tokens"
    if answer.finish_reason == "length" and counted != ask.max_tokens:
        return f"cut at max_tokens {ask.max_tokens}, but usage counts {counted} tokens"
    if usage.accepted is not None and usage.accepted > counted:
        return f"{usage.accepted} accepted draft tokens in an answer of {counted}"
    try:
        again = len(await arm.endpoint.token_ids(answer.text))
    except NotCheckable:
        return ""
    # A text can be written in other tokens than the tokenizer's own, and a stop inside a token leaves a part of it.
    slack = max(2, again // 10)
    return f"usage counts {counted} tokens, the tokenizer {again}" if abs(again - counted) > slack else ""


def _needs_usage(answer: Answer) -> Usage:
    if answer.usage is None:
        raise NotCheckable("the server reports no usage")
    return answer.usage
