"""The two sides of every comparison: the same weights asked with speculation and without.

Knows how one server is asked to do without (our `speculation` field) and that a second server may take its place.
The invariant: a field that a server merely ignores never passes for one that it obeys.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.check.answer import Answer, Ask
from cluster.check.endpoint import Endpoint
from cluster.check.errors import NotCheckable

DEPTHS = (1, 4, 8)
FIELD = "speculation"


@dataclass(frozen=True, slots=True)
class Arm:
    """A server and what its requests say of speculation; None = the field is not sent."""

    endpoint: Endpoint
    speculation: Mapping[str, Any] | None
    seen: list[Answer] = field(default_factory=list)  # all answers so far

    async def ask(self, ask: Ask, **speculation: Any) -> Answer:
        """`speculation` adds to what the arm says anyway. Raises NotCheckable for fields the server does not know."""
        said = self.speculation
        if speculation:
            if said is None:
                raise NotCheckable(f"the server does not know the field {FIELD!r}")
            said = {**said, **speculation}
        answer = await self.endpoint.ask(ask if said is None else ask.having(**{FIELD: said}))
        unknown = [name for name in answer.ignored if name in ask.extra]
        if unknown:
            raise NotCheckable(f"the server says that it ignores {', '.join(unknown)}")
        self.seen.append(answer)
        return answer


@dataclass(frozen=True, slots=True)
class Twins:
    fast: Arm
    other: Arm | None
    controlled: bool  # `fast` obeys the `speculation` field
    acceptance_rules: tuple[str, ...] = ()  # that requests may choose

    @property
    def plain(self) -> Arm:
        """The side without speculation. Raises NotCheckable when there is none."""
        if self.other is None:
            raise NotCheckable(
                f"speculation cannot be turned off: the server does not know the field {FIELD!r}; "
                "name a server without speculation with --against"
            )
        return self.other

    async def both(self, ask: Ask) -> tuple[Answer, Answer]:
        """(with speculation, without). One after the other: each takes one of the endpoint's slots at a time."""
        plain = self.plain
        return await self.fast.ask(ask), await plain.ask(ask)


async def find_twins(fast: Endpoint, against: Endpoint | None) -> Twins:
    """Probe what the servers understand. Both are connected."""
    controlled = await _obeys_speculation(fast)
    on = Arm(fast, {"enabled": True} if controlled else None)
    rules = ("ratio",) if controlled and await _accepts(on, acceptance="ratio") else ()
    if against is None:
        return Twins(on, Arm(fast, {"enabled": False}) if controlled else None, controlled, rules)
    off = Arm(against, {"enabled": False} if await _obeys_speculation(against) else None)
    return Twins(on, off, controlled, rules)


async def _obeys_speculation(endpoint: Endpoint) -> bool:
    """It takes the field, and refuses nonsense in it: a server that knows it not would take both or refuse both."""
    arm = Arm(endpoint, {})
    return await _accepts(arm, enabled=False) and not await _accepts(arm, enabled="perhaps")


async def _accepts(arm: Arm, **speculation: Any) -> bool:
    try:
        answer = await arm.ask(Ask("Hello", 1), **speculation)
    except NotCheckable:
        return False
    return FIELD not in answer.ignored
