"""Cells of the table: what was looked at, and how it came out.

The invariant: a cell without a verdict is `skipped` or `failed` and says why; only a verdict can be `passed`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from cluster.check.answer import Answer
from cluster.check.errors import NotCheckable, OutOfTime, RequestFailed
from cluster.check.together import together

Outcome: TypeAlias = Literal["passed", "near-tie", "violation", "skipped", "failed"]
OnDone: TypeAlias = Callable[[str, int, int], None]  # (check, cells done, cells)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`near-tie` is no violation: two scores so close that rounding decides."""

    outcome: Literal["passed", "near-tie", "violation"]
    detail: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)  # for the JSON report


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    judge: Callable[[], Awaitable[Verdict]]


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    cell: str
    outcome: Outcome
    detail: str
    data: Mapping[str, Any] = field(default_factory=dict)


async def judge_cells(check: str, cells: Sequence[Cell], on_done: OnDone) -> list[Finding]:
    """All at once (the endpoint bounds the requests), in the order of the cells."""
    done = 0

    async def one(cell: Cell) -> Finding:
        nonlocal done
        finding = await judge(check, cell)
        done += 1
        on_done(check, done, len(cells))
        return finding

    return await together(map(one, cells))


async def judge(check: str, cell: Cell) -> Finding:
    try:
        verdict = await cell.judge()
    except (NotCheckable, OutOfTime) as reason:
        return Finding(check, cell.name, "skipped", str(reason))
    except RequestFailed as error:
        return Finding(check, cell.name, "failed", str(error))
    return Finding(check, cell.name, verdict.outcome, verdict.detail, verdict.data)


def passed(detail: str = "", **data: Any) -> Verdict:
    return Verdict("passed", detail, data)


def violation(detail: str, **data: Any) -> Verdict:
    return Verdict("violation", detail, data)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The gravest of several; of equals the first that says something."""
    order = ("violation", "near-tie", "passed")
    return min(verdicts, key=lambda verdict: (order.index(verdict.outcome), not verdict.detail))


def tested(verdicts: Sequence[Verdict], fast: Sequence[Answer], what: str) -> Verdict:
    """The worst verdict; a pass only if accepted drafts were there to be judged (else raises NotCheckable)."""
    verdict = worst(verdicts)
    return verdict if verdict.outcome != "passed" else passed(f"{what}; {drafts_seen(fast, 'accepted')}")


def drafts_seen(answers: Sequence[Answer], what: Literal["accepted", "drafted"]) -> str:
    """A phrase that says how many draft tokens were at work. Raises NotCheckable when the server reports none.

    A parameter that was only ever tried where no draft was verified has not been tried inside a block.
    """
    reported = [a.usage for a in answers if a.usage is not None and a.usage.accepted is not None]
    if not reported:
        return "acceptance is not reported, so it could not be seen"
    accepted = sum(usage.accepted or 0 for usage in reported)
    drafted = accepted + sum(usage.rejected or 0 for usage in reported)
    if (accepted if what == "accepted" else drafted) == 0:
        raise NotCheckable(f"nothing was put to the test: the server reports no {what} draft token in this cell")
    return f"{accepted} of {drafted} draft tokens accepted"
