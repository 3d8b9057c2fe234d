"""Which verifier and which drafter a session goes to. Pure functions of load snapshots; knows nothing of links.

Invariant: the same snapshots and the same session id give the same choice, in any process.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

LOAD_SLACK = 1.25  # a replica takes at most this multiple of the average load (bounded-load consistent hashing)


@dataclass(frozen=True, slots=True)
class VerifierLoad:
    """What the router knows of a verifier: its last report, corrected by what it was given since."""

    replica_id: str
    sessions: int
    capacity: int  # sessions at once; 0 = it does not say
    free_kv_tokens: int
    numerics: str = ""
    max_len: int = 0  # no session grows beyond it; 0 = it does not say


def rendezvous(key: str, replica_ids: Iterable[str]) -> list[str]:
    """All replicas, the one that this key prefers first. A replica that leaves moves only its own keys."""

    def weight(replica_id: str) -> bytes:
        return blake2b(f"{key}\0{replica_id}".encode(), digest_size=8).digest()

    return sorted(replica_ids, key=weight, reverse=True)


def choose_verifier(
    verifiers: Sequence[VerifierLoad], need_tokens: int, numerics: str = "", avoid: str = ""
) -> str | None:
    """The least loaded verifier with room for `need_tokens`; without room, the least loaded one, which may queue.

    A session that has run before prefers its `numerics` fingerprint, and any other verifier to the one it must `avoid`.
    """

    def order(v: VerifierLoad) -> tuple[bool, bool, bool, float, int, str]:
        need = min(need_tokens, v.max_len) if v.max_len else need_tokens
        full = v.free_kv_tokens < need or bool(v.capacity and v.sessions >= v.capacity)
        other_numerics = bool(numerics) and v.numerics != numerics
        share = v.sessions / (v.capacity or 64)
        return (v.replica_id == avoid, other_numerics, full, share, -v.free_kv_tokens, v.replica_id)

    return min(verifiers, key=order).replica_id if verifiers else None


def choose_drafter(session_id: str, sessions_by_drafter: Mapping[str, int]) -> str | None:
    """Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016) over one pool's replicas."""
    if not sessions_by_drafter:
        return None
    average = (sum(sessions_by_drafter.values()) + 1) / len(sessions_by_drafter)
    bound = math.ceil(LOAD_SLACK * average)
    ranked = rendezvous(session_id, sessions_by_drafter)
    return next(d for d in ranked if sessions_by_drafter[d] < bound)
