"""The board: which replicas exist, where they listen, and which router owns which verifier.

Knows nothing of Ray (cluster/ray_board.py puts one into a named actor) or of sessions. Everything on it expires unless
renewed, so a board that died is rebuilt from the renewals of the living.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from cluster.protocol.messages import Hello

EXPIRY_S = 5.0
RENEW_EVERY_S = 1.0

Pool: TypeAlias = Literal["router", "drafter", "verifier", "ingress"]


@dataclass(frozen=True, slots=True)
class Registration:
    """One replica, as it says of itself. `stats` are gauges for metrics and autoscaling."""

    replica_id: str
    pool: Pool
    address: str
    hello: Hello
    stats: dict[str, float] = field(default_factory=dict)


class Board(Protocol):
    """What every process sees of the board. Calls may raise Unavailable for a while; renewals simply go on."""

    async def renew(self, registration: Registration) -> None:
        """Register, or stay registered for another EXPIRY_S."""
        ...

    async def leave(self, replica_id: str) -> None:
        """Forget the replica and its leases at once."""
        ...

    async def members(self, *pools: Pool) -> tuple[Registration, ...]:
        """The living replicas of these pools, ordered by replica_id."""
        ...

    async def lease(self, verifier_id: str, router_id: str) -> bool:
        """Take or renew the lease of a verifier for EXPIRY_S; False when another router holds it."""
        ...

    async def release(self, verifier_id: str, router_id: str) -> None:
        """Give a lease back; nothing happens when another router holds it."""
        ...


class LocalBoard:
    """A board in this process. `clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._members: dict[str, tuple[Registration, float]] = {}
        self._leases: dict[str, tuple[str, float]] = {}

    async def renew(self, registration: Registration) -> None:
        self._members[registration.replica_id] = (registration, self._clock() + EXPIRY_S)

    async def leave(self, replica_id: str) -> None:
        self._members.pop(replica_id, None)
        self._leases = {v: lease for v, lease in self._leases.items() if replica_id not in (v, lease[0])}

    async def members(self, *pools: Pool) -> tuple[Registration, ...]:
        now = self._clock()
        self._members = {k: entry for k, entry in self._members.items() if entry[1] > now}
        return tuple(self._members[k][0] for k in sorted(self._members) if self._members[k][0].pool in pools)

    async def lease(self, verifier_id: str, router_id: str) -> bool:
        now = self._clock()
        holder, expires = self._leases.get(verifier_id, (router_id, now))
        if holder != router_id and expires > now:
            return False
        self._leases[verifier_id] = (router_id, now + EXPIRY_S)
        return True

    async def release(self, verifier_id: str, router_id: str) -> None:
        if self._leases.get(verifier_id, ("", 0.0))[0] == router_id:
            del self._leases[verifier_id]
