"""Calls a drafter so that one request's failure never reaches another: what goes wrong comes out as an answer.

Runs on the worker thread. Knows nothing of links.
"""

import logging
from collections.abc import Sequence

import numpy as np

from cluster.protocol.errors import ProtocolError, Unavailable
from cluster.protocol.messages import (
    DraftBlock,
    DraftRequest,
    Epoch,
    FeatureRows,
    Refused,
    SamplingParams,
    as_tokens,
)
from drafter_service.feature_drafters.features import FeatureFed, FeatureGap
from drafter_service.interface import DraftAnswer, Drafter

logger = logging.getLogger(__name__)


def draft_contained(drafter: Drafter, ended: Sequence[str], requests: Sequence[DraftRequest]) -> list[DraftAnswer]:
    """One answer per request, in order, after forgetting the `ended` sessions. Never raises."""
    try:
        for session_id in ended:
            drafter.close(session_id)
        answers = drafter.draft(requests)
        assert len(answers) == len(requests), (len(answers), len(requests))
        return answers
    except Exception:
        # Whatever broke it, the other sessions of the batch must not pay: find the one by drafting singly.
        logger.exception("a batch of %d draft requests failed", len(requests))
        return [_draft_alone(drafter, request) for request in requests]


def draft_fed(
    drafter: FeatureFed, ended: Sequence[str], rows: Sequence[FeatureRows], requests: Sequence[DraftRequest]
) -> tuple[list[DraftAnswer], dict[str, FeatureGap]]:
    """The same after the rows that have come, and what was lacking, by session."""
    for features in rows:
        try:
            drafter.take(features)
        except ProtocolError as error:
            logger.warning("session %s: unusable features: %s", features.session_id, error)
    answers = draft_contained(drafter, ended, requests)
    return answers, {gap.session_id: gap for gap in drafter.gaps()}


def _draft_alone(drafter: Drafter, request: DraftRequest) -> DraftAnswer:
    try:
        drafter.close(request.session_id)  # what the failed batch left of it is not to be trusted
        return drafter.draft([request])[0]
    except Exception as error:  # a drafter's failure is an answer, never the service's end
        logger.exception("drafting for session %r failed", request.session_id)
        return Refused(request.session_id, request.epoch, "unavailable", f"drafting failed: {error!r}")


def draft_probe(drafter: Drafter, name: str) -> None:
    """Draft for a session of its own and forget it. Raises Unavailable unless a block comes out."""
    session_id = f"probe of {name}"
    probe = DraftRequest(
        session_id=session_id,
        epoch=Epoch(0, 0),
        block_id=0,
        base_len=4,
        prompt_len=4,
        new_tokens=as_tokens([0, 0, 0, 0]),
        depth=2,
        sampling=SamplingParams(max_tokens=2),
    )
    try:
        if isinstance(drafter, FeatureFed):
            rows = np.zeros(3 * drafter.width, np.float32)
            drafter.take(FeatureRows(session_id, probe.epoch, drafter.feature_id, 0, drafter.width, rows))
        (answer,) = drafter.draft([probe])
    except Exception as error:
        raise Unavailable(f"drafting failed: {error!r}") from error
    finally:
        drafter.close(session_id)
    if not isinstance(answer, DraftBlock) or (isinstance(drafter, FeatureFed) and not len(answer.token_ids)):
        raise Unavailable(f"the drafter answered a new session with {answer}")
