"""The joint law of the first two tokens through the real engine, every rule and kind of draft in the same passes.

Chi-square on all 64 cells of two tokens from a vocabulary of 8, against the law worked out in float64 from the scripted
target's logits. False-alarm probability of each comparison: 1e-9 (10 of them in the short form, 10 in the long one).
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cluster.protocol.messages import Rule, SamplingParams
from cluster.simulator.scripted_target import ScriptedLaw
from tests.exactness.chi_square import p_value
from tests.exactness.crowd import Crowd, Kind, Writer

FALSE_ALARM = 1e-9
VOCAB = 8
TARGET = ScriptedLaw(vocab_size=VOCAB, seed=3, spread=4.0)
DRAFTER = ScriptedLaw(vocab_size=VOCAB, seed=4, spread=3.0)  # knows nothing of the target
KEPT = 5  # tokens of 8 that a sampling drafter keeps
PROMPT = [1, 2]
PLAIN = SamplingParams(max_tokens=3, temperature=1.0)
CUT = SamplingParams(max_tokens=3, temperature=0.8, top_k=6, top_p=0.93)

# Who writes: the rule, how the drafts are drawn, and how deep the rounds are.
WAYS: dict[str, tuple[Rule, Kind, bool]] = {
    "block verification of sampled drafts": ("ratio", "sampled", True),
    "point-mass ratio": ("ratio", "point", True),
    "coupled, drafts of the same noise": ("coupled", "raced", True),
    "coupled, point drafts": ("coupled", "point", True),
    "no speculation": ("coupled", "point", False),
}


def law(tokens: list[int], sampling: SamplingParams) -> NDArray[np.float64]:
    """[VOCAB] the target's law after `tokens`, written apart from the shipped filters."""
    logits = TARGET.logits(tokens).astype(np.float64) / sampling.temperature
    best_first = np.argsort(-logits, kind="stable")
    kept = best_first[: sampling.top_k or VOCAB]
    shares = np.exp(logits[kept] - logits[kept[0]])
    shares /= shares.sum()
    before = np.cumsum(shares) - shares
    found = np.zeros(VOCAB)
    found[kept] = np.where(before < sampling.top_p, shares, 0)
    normal: NDArray[np.float64] = found / found.sum()
    return normal


def joint_law(sampling: SamplingParams) -> NDArray[np.float64]:
    """[VOCAB * VOCAB]."""
    first = law(PROMPT, sampling)
    return np.concatenate([first[a] * law([*PROMPT, a], sampling) for a in range(VOCAB)])


def writers(sampling: SamplingParams, count: int, seed: int) -> dict[str, list[Writer]]:
    """`count` of each way; keys are drawn, depths go round and differ between sessions."""
    keys = np.random.default_rng(seed).integers(0, 2**63, (len(WAYS), count)).tolist()
    found = {}
    for (name, (rule, kind, drafted)), own in zip(WAYS.items(), keys, strict=True):
        params = replace(sampling, rule=rule)
        found[name] = [
            Writer(replace(params, key=key), kind, lambda turn, i=i, on=drafted: (2, 1, 2, 0)[(i + turn) % 4] * on)
            for i, key in enumerate(own)
        ]
    return found


def check(sampling: SamplingParams, count: int, seed: int) -> None:
    crowd, ways = Crowd(TARGET, DRAFTER, PROMPT, KEPT), writers(sampling, count, seed)
    # Neighbours in a pass are of different ways.
    crowd.write(list(itertools.chain.from_iterable(zip(*ways.values(), strict=True))))
    expected = torch.from_numpy(joint_law(sampling))
    for name, own in ways.items():
        cells = torch.tensor([writer.tokens[0] * VOCAB + writer.tokens[1] for writer in own])
        assert p_value(cells.bincount(minlength=VOCAB**2), expected) > FALSE_ALARM, name
        judged, accepted = np.array([turn for writer in own for turn in writer.rounds]).sum(axis=0)
        assert (0 < accepted < judged) if WAYS[name][2] else judged == 0, "drafts were really judged"


@pytest.mark.parametrize("sampling", [PLAIN, CUT], ids=["plain", "top-k and top-p"])
def test_two_tokens_have_the_targets_joint_law(sampling: SamplingParams) -> None:
    check(sampling, 1000, seed=1)


def test_texts_of_another_target_are_refused() -> None:
    """The comparison has teeth: a target that differs in one logit by 0.15 is told apart."""
    expected = joint_law(PLAIN)
    logits = np.log(expected.reshape(VOCAB, VOCAB))
    logits[:, expected.reshape(VOCAB, VOCAB).sum(axis=0).argmax()] += 0.15
    other = np.exp(logits).reshape(-1) / np.exp(logits).sum()
    counts = np.random.default_rng(0).multinomial(40_000, other)
    assert p_value(torch.from_numpy(counts), torch.from_numpy(expected)) < FALSE_ALARM


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sampling", [PLAIN, CUT], ids=["plain", "top-k and top-p"])
def test_two_tokens_have_the_targets_joint_law_in_twenty_thousand_texts(sampling: SamplingParams) -> None:
    check(sampling, 20_000, seed=2)
