"""How often drafts are accepted through the real engine: as the closed forms say, within 4 standard deviations.

A shipped distribution that is not the sampled one, or noise that the coupled rule does not share, shows here first.
False-alarm probability of each comparison: 6.4e-5 (12 in the short form, 10 in the long one).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch

from cluster.protocol.messages import SamplingParams
from cluster.protocol.sparse_law import SCALE
from cluster.simulator.scripted_target import ScriptedLaw
from outrider_kernels.sparse_draft import quantise
from tests.exactness.crowd import Crowd, Kind, Writer
from tests.exactness.enumeration.laws import Law, Model, Text, best, chance_of
from tests.exactness.enumeration.race import coupled_acceptance
from tests.exactness.enumeration.rules import block_chances

VOCAB, KEPT, DEPTH = 8, 5, 3
TARGET = ScriptedLaw(vocab_size=VOCAB, seed=13, spread=4.0)
PROMPT = [5, 1, 6]


class Mixed(ScriptedLaw):
    """The target's logits, blurred: a drafter that is often right."""

    def logits(self, tokens: Sequence[int]) -> np.ndarray:  # type: ignore[override]
        blurred: np.ndarray = np.float32(0.6) * TARGET.logits(tokens) + np.float32(0.5) * super().logits(tokens)
        return blurred


DRAFTERS = {
    "blurred": Mixed(vocab_size=VOCAB, seed=14, spread=4.0),
    "foreign": ScriptedLaw(vocab_size=VOCAB, seed=15, spread=4.0),
}


def law(of: ScriptedLaw, text: Sequence[int]) -> Law:
    """At temperature 1; Fractions of float64."""
    logits = of.logits(text).astype(np.float64)
    shares = np.exp(logits - logits.max())
    return tuple(Fraction(float(share)) / Fraction(float(shares.sum())) for share in shares)


def sparse_law(of: ScriptedLaw, text: Sequence[int]) -> Law:
    """What a sampling drafter ships."""
    rows = quantise(torch.from_numpy(of.logits(text))[None].log_softmax(dim=-1), KEPT)
    counts = dict(zip(rows.ids[0].tolist(), rows.counts[0].tolist(), strict=True))
    return tuple(Fraction(counts.get(token, 0), SCALE) for token in range(VOCAB))


def ratio(target: Law, drafter: ScriptedLaw) -> Fraction:
    return sum((min(t, d) for t, d in zip(target, sparse_law(drafter, PROMPT), strict=True)), Fraction(0))


def of_the_best(target: Law, drafter: ScriptedLaw) -> Fraction:
    return target[best(law(drafter, PROMPT))]


def of_the_same_noise(target: Law, drafter: ScriptedLaw) -> Fraction:
    return coupled_acceptance(target, law(drafter, PROMPT))


def of_other_noise(target: Law, drafter: ScriptedLaw) -> Fraction:
    return sum((t * d for t, d in zip(target, sparse_law(drafter, PROMPT), strict=True)), Fraction(0))


CLOSED_FORMS: dict[str, tuple[str, Kind, Callable[[Law, ScriptedLaw], Fraction]]] = {
    "ratio of sampled drafts: sum min(target, draft)": ("ratio", "sampled", ratio),
    "ratio of point drafts: target(draft)": ("ratio", "point", of_the_best),
    "coupled, the same noise: sum 1 / sum max of ratios": ("coupled", "raced", of_the_same_noise),
    "coupled, other noise: sum target draft": ("coupled", "sampled", of_other_noise),
    "coupled, point drafts: target(draft)": ("coupled", "point", of_the_best),
}


def accepted(rule: str, kind: Kind, drafter: ScriptedLaw, depth: int, count: int) -> list[int]:
    """Of the first round of `count` sessions with `depth` drafts."""
    keys = np.random.default_rng(99).integers(0, 2**63, count).tolist()
    params = [SamplingParams(max_tokens=depth + 1, temperature=1.0, rule=rule, key=key) for key in keys]  # type: ignore[arg-type]
    writers = [Writer(one, kind, lambda turn: depth if turn == 0 else 0) for one in params]
    Crowd(TARGET, drafter, PROMPT, KEPT).write(writers)
    assert all(writer.rounds[0][0] == depth for writer in writers)
    return [writer.rounds[0][1] for writer in writers]


def check(way: str, drafter: str, count: int) -> None:
    rule, kind, closed_form = CLOSED_FORMS[way]
    expected = float(closed_form(law(TARGET, PROMPT), DRAFTERS[drafter]))
    found = np.mean(accepted(rule, kind, DRAFTERS[drafter], 1, count))
    assert abs(found - expected) < 4 * math.sqrt(expected * (1 - expected) / count)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("way", CLOSED_FORMS)
def test_acceptance_is_the_closed_form(way: str, drafter: str) -> None:
    check(way, drafter, 1500)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("way", CLOSED_FORMS)
def test_acceptance_is_the_closed_form_in_twenty_thousand_rounds(way: str, drafter: str) -> None:
    check(way, drafter, 20_000)


def by_block(target: Model, draft: Model, block: Text) -> list[Fraction]:
    """The chance of each accepted length."""
    _, chances = block_chances(target, draft, (), block)
    later, found = Fraction(1), []
    for chance in reversed(chances):
        found.append(later * chance)
        later *= 1 - chance
    return [later, *reversed(found)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_accepted_lengths_of_whole_blocks_are_those_of_block_verification(drafter: str) -> None:
    """Mean accepted length of blocks of 3 against the sum over all of them."""
    contexts = [c for length in range(DEPTH) for c in itertools.product(range(VOCAB), repeat=length)]
    draft = {context: sparse_law(DRAFTERS[drafter], [*PROMPT, *context]) for context in contexts}
    target = {context: law(TARGET, [*PROMPT, *context]) for context in contexts}
    lengths = np.zeros(DEPTH + 1)
    for block in itertools.product(range(VOCAB), repeat=DEPTH):
        if drawn := chance_of(draft, block):
            lengths += [float(drawn * chance) for chance in by_block(target, draft, block)]
    assert abs(lengths.sum() - 1) < 1e-9
    places = np.arange(DEPTH + 1)
    mean = float(places @ lengths)
    deviation = math.sqrt(float(places**2 @ lengths) - mean**2)
    found = accepted("ratio", "sampled", DRAFTERS[drafter], DEPTH, 1500)
    assert abs(np.mean(found) - mean) < 4 * deviation / math.sqrt(len(found))


def test_the_same_noise_and_the_ratio_test_accept_within_the_published_bounds() -> None:
    """(1 - TV) / (1 + TV) <= coupled <= 1 - TV = ratio (arXiv 2408.07978)."""
    for drafter in DRAFTERS.values():
        target, draft = law(TARGET, PROMPT), law(drafter, PROMPT)
        most = sum((min(t, d) for t, d in zip(target, draft, strict=True)), Fraction(0))
        assert most / (2 - most) <= coupled_acceptance(target, draft) <= most
