"""Brings what a drafter holds of a session to what a request says is committed.

Knows nothing of how a drafter uses the tokens. Invariant: after `reconcile` the held tokens are a prefix of the
request's history, so nothing is ever drafted from tokens that were not committed.
"""

from collections.abc import Sequence

from cluster.protocol.messages import DraftRequest, Epoch, Stale


def reconcile(held: Sequence[int], held_epoch: Epoch, committed: int, request: DraftRequest) -> int | Stale:
    """How many of the held tokens stay; the request's history goes on with new_tokens from there. Stale if unknown.

    `held` may be longer than the `committed` tokens that earlier requests vouched for (a drafter's own proposals
    follow them). The tokens before the request's new ones are taken on trust from the same router only: another
    incarnation must show the whole history, because its predecessor may have committed tokens that it never saw.
    """
    start = request.base_len - len(request.new_tokens)
    unshown = start > 0 and request.epoch.incarnation != held_epoch.incarnation
    if request.epoch < held_epoch or start > committed:
        return Stale(request.session_id, request.block_id, held_epoch, committed)
    if unshown:
        return Stale(request.session_id, request.block_id, held_epoch, 0)
    return start + common_prefix(held[start : request.base_len], request.new_tokens.tolist())


def unknown(request: DraftRequest) -> Stale:
    """The answer about a session that is not held at all."""
    return Stale(request.session_id, request.block_id, request.epoch, 0)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of leading tokens that agree."""
    pairs = zip(left, right, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
