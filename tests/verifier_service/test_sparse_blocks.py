"""Blocks with distributions through messages: a draft model drafts, the engine judges, the text follows the target."""

import dataclasses

import numpy as np
import pytest
import torch

from cluster.protocol.codec import decode, encode
from cluster.protocol.messages import DraftBlock, DraftRequest, OpenSession, SamplingParams, VerifyRequest, as_tokens
from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from drafter_service.draft_model import DraftModel
from outrider_kernels.target_distribution import target_distribution
from tests.verifier_service.rounds import EPOCH, engine, run_until_result, verify
from verifier_service.engine import Engine

VOCAB = 8
TARGET = ScriptedLaw(vocab_size=VOCAB, seed=1, spread=4.0, window=1)
DRAFTER = ScriptedLaw(vocab_size=VOCAB, seed=2, spread=3.0, window=1)
PROMPT = [1, 2, 3]


def target_engine(sessions: int = 16) -> Engine:
    return engine(
        ScriptedTarget(TARGET, num_pages=8 * sessions + 8), max_sessions=sessions, prefill_chunk_tokens=10_000
    )


def draft_model(sessions: int = 16) -> DraftModel:
    pages = ScriptedTarget(DRAFTER, num_pages=8 * sessions + 8)
    return DraftModel(pages, VOCAB, prefill_rows=100_000, support_size=5)


def ratio(key: int, **kwargs: float) -> SamplingParams:
    return SamplingParams(max_tokens=6, rule="ratio", key=key, **({"temperature": 1.0} | kwargs))  # type: ignore[arg-type]


def judged(name: str, block: DraftBlock) -> VerifyRequest:
    request = VerifyRequest(name, EPOCH, block.block_id, block.base_len, block.token_ids, block.law, block.support)
    (arrived,) = decode(encode([request]))
    assert isinstance(arrived, VerifyRequest)
    return arrived


def drafted(drafter: DraftModel, texts: dict[str, list[int]], samplings: dict[str, SamplingParams], depth: int):
    asked = [
        DraftRequest(name, EPOCH, len(text), len(text), 3, as_tokens(text), depth, samplings[name])
        for name, text in texts.items()
    ]
    return dict(zip(texts, drafter.draft(asked), strict=True))


@pytest.mark.parametrize("sampling", [{}, {"top_k": 4, "temperature": 0.7}, {"top_p": 0.8}])
def test_two_tokens_follow_the_targets_joint_law(sampling):
    """Chi-square over the joint cells of 3,000 sessions; false alarm 1e-7 each."""
    sessions = 3000
    made, drafter = target_engine(sessions), draft_model(sessions)
    samplings = {f"s{key}": ratio(key * 7919, **sampling) for key in range(sessions)}
    texts = {name: list(PROMPT) for name in samplings}
    for name, params in samplings.items():
        assert made.handle(OpenSession(name, EPOCH, as_tokens(PROMPT), 3, params)) == []
    for _ in range(2):
        blocks = drafted(drafter, texts, samplings, depth=2)
        for name, block in blocks.items():
            assert made.handle(judged(name, block)) == []
        for result in run_until_result(made):
            accepted = blocks[result.session_id].token_ids[: result.num_accepted].tolist()
            texts[result.session_id] += [*accepted, result.next_token]
    assert made.counters.unusable_blocks == 0
    assert 0 < made.counters.accepted_tokens < made.counters.drafted_tokens
    pairs = np.array([text[3:5] for text in texts.values()])
    assert p_value(pairs, **sampling) > 1e-7


def p_value(pairs, temperature=1.0, top_k=0, top_p=1.0) -> float:
    logits = torch.from_numpy(np.stack([TARGET.logits([token]) for token in [PROMPT[-1], *range(VOCAB)]]))
    count = len(logits)
    filters = torch.full((count,), temperature), torch.full((count,), top_k), torch.full((count,), top_p)
    laws = target_distribution(logits, *filters).double().exp().numpy()
    cells = (laws[0][:, None] * laws[1:]).flatten()
    counts = np.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB * VOCAB)
    assert counts[cells == 0].sum() == 0
    expected = cells * len(pairs)
    often = expected >= 5
    seen = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], max(expected[~often].sum(), 1e-9))
    statistic = torch.tensor(((seen - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2).double(), statistic / 2))


def test_a_contradictory_block_counts_as_empty_and_harms_nobody_else():
    made, drafter = target_engine(), draft_model()
    samplings = {name: ratio(7) for name in ("sound", "lying", "unlabelled")}
    for name, params in samplings.items():
        made.handle(OpenSession(name, EPOCH, as_tokens(PROMPT), 3, params))
    blocks = drafted(drafter, {name: PROMPT for name in samplings}, samplings, depth=3)
    counts = blocks["lying"].support.counts.copy()
    counts[0] += 1
    lying = dataclasses.replace(blocks["lying"], support=dataclasses.replace(blocks["lying"].support, counts=counts))
    made.handle(judged("sound", blocks["sound"]))
    made.handle(judged("lying", lying))
    made.handle(judged("unlabelled", dataclasses.replace(blocks["unlabelled"], law="point")))
    results = {result.session_id: result for result in run_until_result(made)}
    assert made.counters.unusable_blocks == 2
    assert results["lying"].num_accepted == results["unlabelled"].num_accepted == 0
    assert made.counters.drafted_tokens == 3


def test_the_same_block_sent_again_to_another_verifier_gives_the_same_result():
    """After a failover the identical block goes out again: no new randomness may decide it."""
    for key in range(40):
        params = ratio(key)
        (block,) = drafted(draft_model(), {"a": PROMPT}, {"a": params}, depth=4).values()
        results = []
        for _ in range(2):
            made = target_engine()
            made.handle(OpenSession("a", EPOCH, as_tokens(PROMPT), 3, params))
            made.handle(judged("a", block))
            (result,) = run_until_result(made)
            results.append((result.num_accepted, result.next_token))
        assert results[0] == results[1]


def test_a_sparse_block_is_cut_to_what_max_tokens_leaves():
    made, params = target_engine(), ratio(3)
    made.handle(OpenSession("a", EPOCH, as_tokens(PROMPT), 3, params))
    (block,) = drafted(draft_model(), {"a": PROMPT}, {"a": params}, depth=8).values()
    assert len(block.token_ids) == 8
    made.handle(judged("a", block))
    (result,) = run_until_result(made)
    assert made.counters.drafted_tokens == 5  # max_tokens 6 leaves room for the token after the block
    assert result.num_accepted <= 5


def test_a_coupled_session_takes_a_sparse_block_for_its_tokens():
    made = target_engine()
    params = SamplingParams(max_tokens=6, temperature=1.0, key=5)
    made.handle(OpenSession("a", EPOCH, as_tokens(PROMPT), 3, params))
    made.handle(OpenSession("b", EPOCH, as_tokens(PROMPT), 3, params))
    (block,) = drafted(draft_model(), {"a": PROMPT}, {"a": ratio(5)}, depth=3).values()
    made.handle(judged("a", block))
    made.handle(verify("b", 3))
    results = {result.session_id: result for result in run_until_result(made)}
    accepted = block.token_ids[: results["a"].num_accepted].tolist()
    assert [*accepted, results["a"].next_token][0] == results["b"].next_token
