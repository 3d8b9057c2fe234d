"""Tiny language models with rational probabilities: a law over the vocabulary after every context.

Knows nothing of rules or rounds. Everything is a Fraction, so that two laws are equal or they are not.
"""

import itertools
import random
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cache
from typing import TypeAlias

import torch

from cluster.protocol.sparse_law import SCALE
from outrider_kernels.sparse_draft import quantise

VOCAB, DEPTH = 3, 3
LENGTH = DEPTH + 1  # the longest block and the token after it

Text: TypeAlias = tuple[int, ...]
Law: TypeAlias = tuple[Fraction, ...]  # [VOCAB], sums to 1
Model: TypeAlias = Mapping[Text, Law]  # after every context shorter than LENGTH
TextLaw: TypeAlias = dict[Text, Fraction]  # of whole texts


def contexts() -> Iterator[Text]:
    return (c for length in range(LENGTH) for c in itertools.product(range(VOCAB), repeat=length))


def normalised(weights: list[Fraction] | list[int]) -> Law:
    total = sum(weights)
    return tuple(Fraction(weight) / total for weight in weights)


def point_law(token: int) -> Law:
    return tuple(Fraction(token == other) for other in range(VOCAB))


def best(law: Law) -> int:
    """Ties go to the smaller id."""
    return law.index(max(law))


@cache
def random_model(seed: int, zeros: bool = False) -> Model:
    """Weights of 1..9; with `zeros` half of the contexts lack a token or two."""
    rng = random.Random(seed)
    laws = {}
    for context in contexts():
        weights = [rng.randint(1, 9) for _ in range(VOCAB)]
        if zeros and rng.random() < 0.5:
            for token in rng.sample(range(VOCAB), rng.choice([1, 1, VOCAB - 1])):
                weights[token] = 0
        laws[context] = normalised(weights)
    return laws


def greedy_model(model: Model) -> Model:
    return {context: point_law(best(law)) for context, law in model.items()}


@cache
def point_drafts(seed: int) -> Model:
    """A drafter that is a function of the past: prompt lookup, predictions, a greedy draft model."""
    rng = random.Random(seed)
    return {context: point_law(rng.randrange(VOCAB)) for context in contexts()}


@cache
def sparse_drafts(seed: int, kept: int, zeros: bool = False) -> Model:
    """What a sampling drafter really draws from: the shipped quantisation of a random model to `kept` tokens."""
    model = random_model(seed, zeros)
    return {context: quantised(law, kept) for context, law in model.items()}


def quantised(law: Law, kept: int) -> Law:
    log_draft = torch.tensor([[float(share) for share in law]]).log()
    rows = quantise(log_draft, kept)
    counts = dict(zip(rows.ids[0].tolist(), rows.counts[0].tolist(), strict=True))
    return tuple(Fraction(counts.get(token, 0), SCALE) for token in range(VOCAB))


def chance_of(model: Model, text: Text, context: Text = ()) -> Fraction:
    """Of drawing `text` after `context`, token by token."""
    chance = Fraction(1)
    for i, token in enumerate(text):
        chance *= model[context + text[:i]][token]
    return chance


def texts(length: int = LENGTH) -> Iterator[Text]:
    return itertools.product(range(VOCAB), repeat=length)


def law_of(model: Model, length: int = LENGTH) -> TextLaw:
    """The law of texts that the model writes by itself."""
    return {text: chance_of(model, text) for text in texts(length)}


def total_variation(one: TextLaw, other: TextLaw) -> Fraction:
    found = set(one) | set(other)
    none = Fraction(0)
    return sum((abs(one.get(text, none) - other.get(text, none)) for text in found), none) / 2
