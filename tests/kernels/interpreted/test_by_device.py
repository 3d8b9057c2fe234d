"""What a GPU's tensors get, put in the place of what a CPU's get: the same drafts, the same acceptance."""

import numpy as np
import pytest
import torch

from cluster.protocol.messages import SamplingParams
from outrider_kernels import accept, by_device
from outrider_kernels.draft_choice import choose_drafts
from outrider_kernels.grammar_mask import GrammarMask, packed
from outrider_kernels.processors import process
from outrider_kernels.sparse_draft import DraftSupports, SparseRows, to_message

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
VOCAB, DEPTH = 90, 3
KINDS = [
    SamplingParams(9),
    SamplingParams(9, 0.8, key=5),
    SamplingParams(9, 1.1, top_k=20, top_p=0.9, min_p=0.01, key=2**64 - 3, choice=2),
    SamplingParams(9, 1.0, rule="ratio", key=11),
    SamplingParams(9, 0.7, top_k=12, rule="ratio", key=12),
]


def one_round() -> list[list[int]]:
    """Drafts, how many of them stand, and what follows, of sessions of every kind under a grammar."""
    generator = torch.Generator().manual_seed(7)
    sessions = [KINDS[i % len(KINDS)] for i in range(15)]
    rows = accept.SamplingRows.of(sessions, [20 + i for i in range(len(sessions))])
    target = 2 * torch.randn(len(sessions), DEPTH + 1, VOCAB, generator=generator)
    drafts = torch.full((len(sessions), DEPTH + 1), -1)
    laws = []
    for index in range(DEPTH):
        noise = 0.5 * torch.randn(len(sessions), VOCAB, generator=generator)
        drafts[:, index], law = choose_drafts(target[:, index] + noise, rows, index, 16)
        laws.append(law)
    allowed = np.random.default_rng(3).random((len(sessions) * (DEPTH + 1), VOCAB)) < 0.9
    mask = GrammarMask(np.arange(len(allowed)), packed(allowed), VOCAB)
    supports = [
        to_message([SparseRows(law.ids[i], law.counts[i]) for law in laws]) if session.rule == "ratio" else None
        for i, session in enumerate(sessions)
    ]
    accepted, following = accept.accept_blocks(
        process(target.flatten(0, 1), [], mask),
        torch.arange(len(sessions) + 1) * (DEPTH + 1),
        drafts.flatten(),
        rows,
        DraftSupports.of(supports, [DEPTH] * len(sessions)),
    )
    return [drafts.flatten().tolist(), accepted.tolist(), following.tolist()]


def test_a_round_comes_out_the_same_over_all_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = one_round()
    kernels = by_device._triton()
    assert all("_triton" in kernel.__module__ or kernel.__name__ == "sample" for kernel in kernels)
    monkeypatch.setattr(by_device, "_TORCH", kernels)
    assert one_round() == expected
    assert set(expected[1]) >= {0, DEPTH}, "both a rejection and a whole block were put to the test"
