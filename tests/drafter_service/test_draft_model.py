"""Over a target without a model, which reads its context back from the pages: a cache that holds anything but the
committed history proposes something else than the law says."""

import random

import numpy as np
import pytest
import torch

from cluster.protocol.messages import DraftBlock, DraftRequest, Epoch, SamplingParams, Stale, as_tokens
from cluster.protocol.sparse_law import contradiction
from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from drafter_service.draft_model import DraftModel
from outrider_kernels.target_distribution import target_distribution

LAW = ScriptedLaw(vocab_size=50, seed=3)
GREEDY = SamplingParams(max_tokens=100)
FIRST = Epoch(0, 0)


def model(**kwargs) -> DraftModel:
    target = ScriptedTarget(LAW, **{key: kwargs.pop(key) for key in ("num_pages", "max_len") if key in kwargs})
    return DraftModel(target, vocab_size=LAW.vocab_size, **kwargs)


def request(tokens, new=None, depth=4, session="a", sampling=GREEDY, epoch=FIRST) -> DraftRequest:
    shown = tokens if new is None else tokens[len(tokens) - new :]
    return DraftRequest(session, epoch, 1, len(tokens), 1, as_tokens(shown), depth, sampling)


def drafted(drafter, *args, **kwargs) -> list[int]:
    (answer,) = drafter.draft([request(*args, **kwargs)])
    assert isinstance(answer, DraftBlock), answer
    return answer.token_ids.tolist()


def law_says(tokens, depth, sampling=GREEDY) -> list[int]:
    text = list(tokens)
    for _ in range(depth):
        text.append(LAW.next_token(text, sampling))
    return text[len(tokens) :]


SAMPLED = [
    GREEDY,
    SamplingParams(max_tokens=9, temperature=1.5, key=7),
    SamplingParams(max_tokens=9, temperature=0.8, top_k=5, key=2**63 + 5, choice=1),
    SamplingParams(max_tokens=9, temperature=1.2, top_p=0.7, key=1),
]


@pytest.mark.parametrize("sampling", SAMPLED)
@pytest.mark.parametrize("depth", [0, 1, 2, 7])
def test_drafts_what_the_model_itself_would_choose_with_the_requests_noise(depth, sampling):
    assert drafted(model(), [5, 6, 7], depth=depth, sampling=sampling) == law_says([5, 6, 7], depth, sampling)


def ratio(key, temperature=2.0, **kwargs) -> SamplingParams:
    return SamplingParams(max_tokens=9, temperature=temperature, key=key, rule="ratio", **kwargs)


def test_under_the_ratio_rule_a_greedy_draft_is_a_point_mass():
    (block,) = model().draft([request([5, 6], sampling=ratio(3, temperature=0.0))])
    assert block.token_ids.tolist() == law_says([5, 6], 4)
    assert (block.law, block.support) == ("point", None)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.6)])
def test_under_the_ratio_rule_the_draft_ships_the_distributions_it_was_drawn_from(top_k, top_p):
    """Each row is what the model says of its place under the request's processing, rounded to 2^-16."""
    (block,) = model(support_size=20).draft([request([5, 6, 7], sampling=ratio(3, top_k=top_k, top_p=top_p))])
    assert block.law == "sparse"
    assert contradiction(block.token_ids, block.law, block.support, LAW.vocab_size) == ""
    text = [5, 6, 7]
    for row, token in enumerate(block.token_ids.tolist()):
        start, end = block.support.starts[row], block.support.starts[row + 1]
        shipped = np.zeros(LAW.vocab_size)
        shipped[block.support.ids[start:end]] = (block.support.counts[start:end].astype(int) + 1) / 2**16
        filters = torch.tensor([2.0]), torch.tensor([top_k]), torch.tensor([top_p])
        full = target_distribution(torch.from_numpy(LAW.logits(text))[None], *filters)[0].double().exp().numpy()
        full[full < np.sort(full)[-20]] = 0
        np.testing.assert_allclose(shipped, full / full.sum(), atol=2**-16)
        text.append(token)


def test_under_the_ratio_rule_drafts_follow_the_shipped_distribution():
    """Chi-square of the first token over 2,000 sessions, cells of at least 5; false alarm 1e-6."""
    drafter = model(support_size=8, num_pages=4000, prefill_rows=10_000)
    blocks = drafter.draft(
        [request([5, 6], depth=1, session=f"s{key}", sampling=ratio(key * 7919)) for key in range(2000)]
    )
    ids, counts = blocks[0].support.ids, blocks[0].support.counts.astype(int) + 1
    seen = np.array([sum(int(block.token_ids[0]) == token for block in blocks) for token in ids])
    assert seen.sum() == 2000
    expected = torch.from_numpy(counts / 2**16 * 2000)
    assert float(expected.min()) >= 5
    statistic = float((((torch.from_numpy(seen) - expected) ** 2) / expected).sum())
    freedom = torch.tensor((len(ids) - 1) / 2).double()
    assert float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2).double())) > 1e-6


def test_a_drawn_draft_runs_every_step_asked_whatever_it_draws():
    """Stopping at a token that was drawn would let the token decide whether it is verified."""
    sampling = ratio(5, stop_token_ids=tuple(range(50)))
    for length in range(1, 6):
        assert len(drafted(model(), [3] * length, depth=6, sampling=sampling, session=str(length))) == 6


def test_sessions_of_every_rule_draft_together_as_if_alone():
    kinds = [GREEDY, ratio(1), SAMPLED[1], ratio(2, top_k=3), ratio(3, temperature=0.0), ratio(4, top_p=0.5)]
    texts = [[7 + i] * (1 + 3 * i) for i in range(6)]
    depths = [2, 5, 3, 1, 4, 5]
    asked = [
        request(text, depth=depth, session=f"s{i}", sampling=kind)
        for i, (text, depth, kind) in enumerate(zip(texts, depths, kinds, strict=True))
    ]
    for one, together in zip(asked, model().draft(asked), strict=True):
        (alone,) = model().draft([one])
        assert together.token_ids.tolist() == alone.token_ids.tolist()
        assert together.law == alone.law
        if alone.support is not None:
            assert together.support.counts.tolist() == alone.support.counts.tolist()
            assert together.support.ids.tolist() == alone.support.ids.tolist()
            assert together.support.starts.tolist() == alone.support.starts.tolist()


def test_confidence_is_the_probability_of_the_best_token_not_of_the_drawn_one():
    sampling = SamplingParams(max_tokens=9, temperature=1.5, key=11)
    (block,) = model().draft([request([5, 6, 7], sampling=sampling)])
    text = [5, 6, 7]
    for token, confidence in zip(block.token_ids, block.confidence, strict=True):
        logits = LAW.logits(text).astype(np.float64)
        assert confidence == pytest.approx(1 / np.exp(logits - logits.max()).sum(), rel=1e-5)
        text.append(int(token))
    assert block.confidence.dtype == np.float32


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
def test_the_cache_covers_the_committed_tokens_exactly_however_many_were_accepted(accepted):
    drafter = model()
    text = [9, 8, 7]
    for _ in range(4):
        block = drafted(drafter, text, new=None if len(text) == 3 else accepted + 1, depth=4)
        assert block == law_says(text, 4)
        assert drafter.cached_rows("a") == len(text) + 3  # the last proposal was never run
        wrong = (block[accepted] + 1) % 50 if accepted < 4 else 17
        text += [*block[:accepted], wrong]


def test_sessions_of_different_lengths_and_depths_draft_together_as_if_alone():
    drafter = model()
    texts = {f"s{i}": [i + 1] * (1 + 5 * i) for i in range(6)}
    depths = [3, 0, 7, 1, 4, 2]
    for _ in range(3):
        asked = [
            request(text, depth=depth, session=name) for (name, text), depth in zip(texts.items(), depths, strict=True)
        ]
        answers = drafter.draft(asked)
        for (name, text), depth, answer in zip(texts.items(), depths, answers, strict=True):
            assert answer.session_id == name
            assert answer.token_ids.tolist() == law_says(text, depth)
        for name, answer in zip(texts, answers, strict=True):
            texts[name] = [*texts[name], *answer.token_ids.tolist()[:2], 33]


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_growth_rollback_and_loss_drafts_from_the_given_history(seed):
    rng = random.Random(seed)
    drafter, texts, known = model(num_pages=40), {}, {}
    for _ in range(60):
        session = rng.choice("abcdef")
        text = texts.setdefault(session, [rng.randrange(50)])
        if rng.random() < 0.2:
            text = text[: rng.randrange(1, len(text) + 1)]  # a shorter history
            known[session] = min(known.get(session, 0), len(text))
        text = [*text, *(rng.randrange(50) for _ in range(rng.randrange(4)))]
        depth = rng.randrange(5)
        (answer,) = drafter.draft([request(text, len(text) - known.get(session, 0), depth, session)])
        if isinstance(answer, Stale):
            assert answer.have_len == 0  # evicted
            (answer,) = drafter.draft([request(text, None, depth, session)])
        assert answer.token_ids.tolist() == law_says(text, depth)
        known[session] = len(text)
        texts[session] = [*text, *answer.token_ids.tolist()[: rng.randrange(depth + 1)]]


def test_tokens_missing_in_between_are_answered_with_what_is_held():
    drafter = model()
    drafted(drafter, [1, 2, 3])
    (answer,) = drafter.draft([request([1, 2, 3, 4, 5], new=1)])
    assert answer == Stale("a", 1, FIRST, 3)  # its own proposals do not count as committed


def test_a_different_history_is_drafted_from_and_not_the_cached_one():
    drafter = model()
    drafted(drafter, [1, 2, 3, 4, 5])
    assert drafted(drafter, [1, 2, 9, 4, 5], epoch=Epoch(1, 0)) == law_says([1, 2, 9, 4, 5], 4)


def test_a_session_past_the_models_context_gets_an_empty_block_and_the_others_keep_theirs():
    drafter = model(max_len=60, prefill_rows=1000)
    texts = {f"s{i}": [i] * 50 for i in range(15)} | {"long": [7] * 61}
    answers = drafter.draft([request(text, session=name, depth=3) for name, text in texts.items()])
    for (name, text), answer in zip(texts.items(), answers, strict=True):
        assert answer.token_ids.tolist() == ([] if name == "long" else law_says(text, 3))
    assert drafted(drafter, [7] * 62, new=1, session="long") == []  # and asks for no history it could not use


@pytest.mark.parametrize(("length", "proposals"), [(57, 4), (58, 3), (59, 2), (60, 1), (61, 0)])
def test_depth_shrinks_to_what_the_models_context_holds(length, proposals):
    assert drafted(model(max_len=60), [3] * length, depth=4) == law_says([3] * length, proposals)


def test_a_full_pool_forgets_the_session_that_was_idle_longest():
    drafter = model(num_pages=6)  # 24 rows
    for session in "abc":
        drafted(drafter, [1, 2, 3, 4, 5], session=session, depth=3)  # 7 rows: two pages each
    drafted(drafter, [1, 2, 3, 4, 5, 6], new=1, session="a", depth=2)
    assert drafted(drafter, [8] * 6, session="d", depth=2) == law_says([8] * 6, 2)
    (answer,) = drafter.draft([request([1, 2, 3, 4, 5, 6], new=1, session="b")])
    assert isinstance(answer, Stale)
    assert answer.have_len == 0
    assert drafter.cached_rows("a") > 0


def test_a_session_that_cannot_fit_gets_an_empty_block_and_the_others_keep_theirs():
    drafter = model(num_pages=4)
    small, large = drafter.draft([request([5] * 3, session="a", depth=2), request([6] * 30, session="b")])
    assert small.token_ids.tolist() == law_says([5] * 3, 2)
    assert large.token_ids.tolist() == []


def test_a_long_prompt_is_run_over_several_requests_without_holding_up_other_sessions():
    largest = []
    target = ScriptedTarget(LAW, on_run=lambda batch: largest.append(len(batch.token_ids)))
    drafter = DraftModel(target, vocab_size=50, prefill_rows=40)
    long, short = [*range(50), *range(50)], [3, 4]
    drafter.draft([request(short, session="short")])
    blocks = []
    for _ in range(4):
        short = [*short, 7]
        new = None if not blocks else 1
        answers = drafter.draft([request(long, new, session="long"), request(short, 1, session="short")])
        assert answers[1].token_ids.tolist() == law_says(short, 4)
        blocks.append(answers[0].token_ids.tolist())
        assert blocks[-1] in ([], law_says(long, 4))
        long = [*long, 9]
    assert blocks[0] == blocks[1] == []
    assert len(blocks[3]) == 4
    assert max(largest) <= 40 + 2


def test_a_batch_of_long_prompts_only_gives_empty_blocks():
    drafter = model(prefill_rows=10)
    texts = {name: [ord(name) % 50] * 90 for name in "abc"}
    for answer in drafter.draft([request(text, session=name) for name, text in texts.items()]):
        assert answer.token_ids.tolist() == []
    for name, text in texts.items():
        for _ in range(3):
            last = drafted(drafter, text, new=0, session=name)
        assert last == law_says(text, 4)


def test_closing_gives_the_pages_back():
    drafter = model(num_pages=4)
    for session in "abcdefgh":
        assert drafted(drafter, [1] * 12, session=session) == law_says([1] * 12, 4)
        drafter.close(session)
    drafter.close("never opened")
    assert drafter.sessions == 0


def test_proposals_stay_within_the_targets_vocabulary():
    drafter = DraftModel(ScriptedTarget(LAW), vocab_size=10)
    for key in range(20):
        sampling = SamplingParams(max_tokens=9, temperature=3.0, key=key)
        assert max(drafted(drafter, [1, 2, key], session=str(key), sampling=sampling)) < 10


def test_a_model_that_computes_nan_harms_no_other_session():
    drafter = DraftModel(ScriptedTarget(ScriptedLaw(vocab_size=50, seed=3, nan_token=49)), vocab_size=50)
    sampling = SamplingParams(max_tokens=9, temperature=1.0, key=1)
    sick, well = drafter.draft(
        [request([49], session="a", sampling=sampling), request([5, 6], session="b", sampling=sampling)]
    )
    assert sick.confidence[0] == 0.0
    assert sick.token_ids.min() >= 0
    assert sick.token_ids.max() < 50
    assert well.token_ids.tolist() == law_says([5, 6], 4, sampling)
