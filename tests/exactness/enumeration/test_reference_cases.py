"""48 cases recorded from an independent implementation of the token rule (DeepSpec's verify_draft_tokens).

tests/data/rejection.safetensors: target and dense draft distributions over 16 tokens, uniforms, and what came of them.
Greedy, point-mass and identical cases are among them.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider_kernels.block_verification import accepted_by_token, log_residual

CASES = load_file(Path(__file__).parents[2] / "data" / "rejection.safetensors")
DEPTH = CASES["tokens"].shape[1]


def of_tokens(law: torch.Tensor) -> torch.Tensor:
    """[cases, DEPTH] float64: the probabilities of the draft tokens."""
    return law[:, :DEPTH].double().gather(-1, CASES["tokens"][..., None]).squeeze(-1)


def test_the_token_rule_accepts_what_the_recorded_one_accepted() -> None:
    target, draft = of_tokens(CASES["target_probs"]), of_tokens(CASES["draft_probs"])
    depth = torch.full((len(target),), DEPTH)
    accepted = accepted_by_token(target, draft, CASES["uniforms"].double(), depth)
    assert accepted.tolist() == CASES["accepted"].tolist()
    assert len(set(accepted.tolist())) == DEPTH + 1, "cases of every accepted length"


def test_the_next_token_has_the_recorded_law() -> None:
    for case, accepted in enumerate(CASES["accepted"].tolist()):
        target = CASES["target_probs"][case, accepted].double()
        weights = target
        if accepted < DEPTH:
            draft = CASES["draft_probs"][case, accepted].double()
            weights = log_residual(target[None], draft[None], torch.ones(1, dtype=torch.float64))[0].exp()
        assert (weights / weights.sum()).tolist() == pytest.approx(CASES["next_dist"][case].tolist(), abs=2e-6)
