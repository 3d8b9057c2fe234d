"""How many tokens a session's next round drafts. Pure: a frozen snapshot and a time in, a decision with its reason out.

Policies know nothing of links or sessions. `decide_depth` applies every limit after the policy: a decision never
exceeds what the request, the drafter, the verifier, max_tokens or the context allow.
"""

from dataclasses import dataclass
from typing import Protocol

from cluster.config import DepthPolicyConfig
from cluster.protocol.messages import Hello


@dataclass(frozen=True, slots=True)
class DepthDecision:
    """`depth` 0 calls no drafter. The reason is shown in metrics and logs."""

    depth: int
    reason: str


UNPLANNED = DepthDecision(0, "unmeasured")


@dataclass(frozen=True, slots=True)
class DepthSnapshot:
    """What is known before the round starts; only rounds already resolved have left a trace in it."""

    committed_len: int
    remaining: int  # tokens that may still be committed, >= 1
    enabled: bool  # the request allows speculation
    request_max_depth: int | None
    verifier_max_depth: int
    drafter: Hello | None  # None: no drafter can be asked now
    bypass_rounds: int  # rounds for which drafting does not pay
    draft_outstanding: bool  # its last draft was asked for and has not come yet
    baseline_known: bool  # what depth 0 costs was measured lately, or nobody needs to know
    planned: DepthDecision = UNPLANNED  # by the plan for the verifier's next pass, where there is one


class DepthPolicy(Protocol):
    def decide(self, snapshot: DepthSnapshot, now_s: float) -> DepthDecision: ...


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """Always the same depth."""

    depth: int

    def decide(self, snapshot: DepthSnapshot, now_s: float) -> DepthDecision:
        return DepthDecision(self.depth, "fixed")


@dataclass(frozen=True, slots=True)
class NoDrafting:
    """Speculation is off."""

    def decide(self, snapshot: DepthSnapshot, now_s: float) -> DepthDecision:
        return DepthDecision(0, "off")


@dataclass(frozen=True, slots=True)
class AsPlanned:
    """What the plan for all sessions of the verifier gives this one (depth_planner.py)."""

    def decide(self, snapshot: DepthSnapshot, now_s: float) -> DepthDecision:
        return snapshot.planned


def policy_from(config: DepthPolicyConfig) -> DepthPolicy:
    match config.kind:
        case "adaptive":
            return AsPlanned()
        case "fixed":
            return FixedDepth(config.depth)
        case "off":
            return NoDrafting()


def decide_depth(policy: DepthPolicy, snapshot: DepthSnapshot, now_s: float) -> DepthDecision:
    """The policy's wish, unless the request, the bypass or the lack of a drafter forbids it, cut to every limit."""
    if not snapshot.enabled or snapshot.request_max_depth == 0:
        return DepthDecision(0, "request")
    wish = policy.decide(snapshot, now_s)
    if wish.depth == 0:
        return wish
    if snapshot.bypass_rounds > 0:
        return DepthDecision(0, f"bypass: drafts do not pay, {snapshot.bypass_rounds} rounds to go")
    if snapshot.draft_outstanding:
        return DepthDecision(0, "late")
    if snapshot.drafter is None:
        return DepthDecision(0, "no drafter")
    if not snapshot.baseline_known:
        return DepthDecision(0, "baseline")
    room = deepest(
        snapshot.drafter,
        snapshot.verifier_max_depth,
        snapshot.request_max_depth,
        snapshot.committed_len,
        snapshot.remaining,
    )
    depth = min(wish.depth, room)
    return wish if depth == wish.depth else DepthDecision(max(0, depth), "limit")


def deepest(
    drafter: Hello, verifier_max_depth: int, request_max_depth: int | None, committed_len: int, remaining: int
) -> int:
    """The deepest block that fits everywhere, less than 0 if none; the token after the block needs room too."""
    limits = [remaining - 1, verifier_max_depth, drafter.max_depth]
    if request_max_depth is not None:
        limits.append(request_max_depth)
    if drafter.max_len:
        limits.append(drafter.max_len - committed_len)
    return min(limits)
