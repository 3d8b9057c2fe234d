"""Sampled texts under rules follow the law computed from the rules, jointly over two tokens of one block."""

import numpy as np
import pytest
import torch

from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from tests.exactness.chi_square import p_value
from tests.verifier_service.rounds import Player, engine

LAW = ScriptedLaw(vocab_size=5, seed=1, spread=2.0, window=0)  # the same logits after every text
PROMPT = [1, 0, 1]
DRAWS = 1200
FALSE_ALARM = 1e-6  # of each case
ASKED = {
    "logit_bias": ((2, 0.7),),
    "bad_words": ((3, 3), (0, 2)),
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.6,
    "presence_penalty": 0.5,
}


def law_after(output: list[int]) -> np.ndarray:
    """[vocab] float64, token by token."""
    scores = LAW.logits(PROMPT).astype(np.float64)
    scores[2] += 0.7
    for first, second in ((3, 3), (0, 2)):
        if output[-1:] == [first]:
            scores[second] = -np.inf
    for token in range(5):
        times = output.count(token)
        if times or token in PROMPT:
            scores[token] = scores[token] / 1.4 if scores[token] > 0 else scores[token] * 1.4
        scores[token] -= 0.6 * times + 0.5 * (times > 0)
    weights = np.exp(scores / 0.9)
    kept = weights >= 0.1 * weights.max()
    return weights * kept / (weights * kept).sum()


def joint_law() -> torch.Tensor:
    first = law_after([])
    return torch.from_numpy(np.stack([first[token] * law_after([token]) for token in range(5)]).reshape(-1))


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
@pytest.mark.parametrize("draft", [[2, 2], [3, 3]])
def test_two_tokens_of_one_block_follow_their_joint_law_under_all_rules(rule: str, draft: list[int]) -> None:
    law = joint_law()
    assert bool((law == 0).any())
    counts = torch.zeros(25, dtype=torch.int64)
    for start in range(0, DRAWS, 100):
        player = Player(engine(ScriptedTarget(LAW, num_pages=512), max_sessions=100))
        for key in range(start, start + 100):
            sampling = ASKED | {"max_tokens": 3, "temperature": 0.9, "min_p": 0.1, "rule": rule, "key": key}
            player.open(str(key), PROMPT, **sampling)
        for first, second, _ in player.finish(lambda tokens, depth: draft[:depth], depths=(2,)).values():
            counts[5 * first + second] += 1
    assert int(counts.sum()) == DRAWS
    assert p_value(counts, law) > FALSE_ALARM


def test_the_law_of_this_file_is_told_from_one_that_forgets_the_drafts() -> None:
    """The same number of draws from a law without the hypothetical counts fails by far."""
    forgetful = np.outer(law_after([]), law_after([])).reshape(-1)
    counts = np.random.default_rng(1).multinomial(DRAWS, forgetful)
    assert p_value(torch.from_numpy(counts), joint_law()) < FALSE_ALARM
