"""A session with everything that this router knows about where its parts live and how its present round stands.

Plain state shared by the round logic, the dispatchers and the service, which run in one event loop. Invariant: a round
is in one phase at a time: waiting for its block, ready with a block, or out at the verifier (`state.outstanding`).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.protocol.messages import DraftSupport, Law, Speculation, Tokens
from router.acceptance_estimate import Acceptance
from router.bypass import Bypass
from router.depth_policy import UNPLANNED, DepthDecision
from router.depth_probe import Probe
from router.peer import Peer
from router.session import SessionState

if TYPE_CHECKING:
    from router.dispatch import Timer
    from router.drafters import DrafterReplica
    from router.verifiers import Verifier


@dataclass(slots=True)
class AskedDraft:
    """The one outstanding DraftRequest of a session."""

    block_id: int
    base_len: int
    depth: int
    asked_s: float
    deadline_s: float  # later, the round goes on without the block
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """What a ready round proposes; no tokens = depth 0."""

    token_ids: Tokens
    law: Law = "point"
    support: DraftSupport | None = None


@dataclass(slots=True)
class RoundClock:
    """When the present round passed its stations, in seconds of the router's clock."""

    started_s: float
    asked: bool = False  # the round waited for a drafter
    ready_s: float = 0.0
    shipped_s: float = 0.0
    repeated_s: float = 0.0


@dataclass(eq=False, slots=True)
class RoutedSession:
    state: SessionState
    speculation: Speculation
    ingress: Peer
    clock: RoundClock
    need_tokens: int  # KV tokens that it may come to hold
    # the round
    block_id: int = 0
    reason: str = ""  # of the present round's depth
    draft: AskedDraft | None = None
    waits_for_draft: bool = False
    block: Block | None = None
    bypass: Bypass = field(default_factory=Bypass)
    decision: DepthDecision = UNPLANNED  # as the round began; `reason` may become another
    acceptance: Acceptance = field(default_factory=Acceptance)
    probe: Probe = field(default_factory=Probe)
    # the drafter
    drafter: "DrafterReplica | None" = None
    drafter_len: int = 0  # committed tokens that the drafter is known to hold
    drafter_refusals: int = 0
    drafter_after_s: float = 0.0  # no drafter before, after a refusal
    # the verifier
    verifier: "Verifier | None" = None
    numerics: str = ""
    left_verifier: str = ""  # the one it was at before
    lost_because: str = ""
    attempts: int = 0  # placements since the last committed round
    retry: "Timer | None" = None  # when it is tried again to place it
    deadline_s: float | None = None  # by when a placement must have committed something

    @property
    def session_id(self) -> str:
        return self.state.session_id

    @property
    def is_new(self) -> bool:
        """Nobody has had a token of it yet, so it may be refused without loss."""
        return self.state.epoch.incarnation == 0 and len(self.state) == self.state.prompt_len
