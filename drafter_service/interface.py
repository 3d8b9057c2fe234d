"""What a drafter is: something that answers draft requests. One file per drafter implements it.

Knows nothing of links or threads: the service calls a drafter from one thread only. A drafter can change how fast text
comes, never which text: whatever it proposes is judged by the target.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from cluster.protocol.messages import DraftBlock, DraftRequest, Refused, SamplingParams, Stale

DraftAnswer: TypeAlias = DraftBlock | Stale | Refused


class Drafter(Protocol):
    """Holds what it needs of each session; all of it is disposable, and a session it has lost answers Stale."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftAnswer]:
        """One answer per request, in the same order. At most one request per session.

        Brings each session to base_len first: appends what is new, rolls back what is not the request's history.
        """
        ...

    def close(self, session_id: str) -> None:
        """Forget the session. Unknown sessions are fine."""
        ...

    @property
    def sessions(self) -> int:
        """How many sessions are held."""
        ...


def sampling_of(request: DraftRequest) -> SamplingParams:
    """What a drafter reads: the service has put it into every request."""
    assert request.sampling is not None, request.session_id
    return request.sampling
