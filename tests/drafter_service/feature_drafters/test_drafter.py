"""A drafter fed with features, whatever comes when: holes, doubles, new routers and verifiers, many lengths at once.

Its answers are compared with those of a fresh drafter that got everything in one piece.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.protocol.errors import ProtocolError
from cluster.protocol.messages import DraftBlock, DraftRequest, Epoch, SamplingParams, Stale, as_tokens
from drafter_service.containment import draft_contained, draft_probe
from drafter_service.feature_drafters.drafter import FeatureDrafter
from drafter_service.feature_drafters.features import FeatureGap
from drafter_service.feature_drafters.from_checkpoint import open_feature_drafter, proposer_of
from drafter_service.feature_drafters.loading import LoadedDrafter
from outrider_kernels.accept import SamplingRows, choose_tokens
from tests.drafter_service.feature_drafters.recorded_rounds import (
    EPOCH,
    GOLDEN,
    Golden,
    RecordingBlockModel,
    RecordingChainModel,
    Session,
    Target,
    drafter_of,
    message,
    recording,
)

TEXT = [181, 159, 179, 207, 156, 44, 38, 156, 176, 238, 193, 94, 5, 179, 114, 235, 156, 176, 248, 156, 176, 248]
FAMILIES = ["dspark_gated", "dflash_zlab", "eagle3", "eagle3_d2t"]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def at_once(loaded: LoadedDrafter, target: Target, length: int, sampling: SamplingParams | None = None) -> DraftBlock:
    """What a fresh drafter answers that gets the whole history in one piece."""
    return opened(loaded, target, length, sampling).draft(4)


def opened(loaded: LoadedDrafter, target: Target, length: int, sampling: SamplingParams | None = None) -> Session:
    return Session(drafter_of(loaded), loaded, target, TEXT[:length], sampling or SamplingParams(64))


def same(left: DraftBlock, right: DraftBlock) -> bool:
    return left.token_ids.tolist() == right.token_ids.tolist() and np.allclose(
        left.confidence, right.confidence, atol=1e-5
    )


# --- features that come in pieces, late, twice or not at all -------------------------------------------------------


def test_features_in_pieces_draft_as_in_one(family: Golden, target: Target) -> None:
    loaded = family.load()
    session = opened(loaded, target, 10)
    for stop in (1, 4, 5, 9):
        session.send_features(stop)
    assert same(session.draft(4), at_once(loaded, target, 10))


def test_rounds_draft_as_a_fresh_drafter_does(family: Golden, target: Target) -> None:
    loaded = family.load()
    session = opened(loaded, target, 9)
    for length in (9, 10, 13, 14, 20):
        session.tokens = TEXT[:length]
        assert same(session.draft(4), at_once(loaded, target, length))


def test_over_a_hole_nothing_is_drafted_and_the_hole_is_named_once(family: Golden, target: Target) -> None:
    loaded = family.load()
    session = opened(loaded, target, 9)
    session.draft(4)
    session.tokens, session.sent_rows = TEXT[:13], 10  # rows 8 and 9 are lost
    block = session.draft(4)
    assert block.token_ids.tolist() == []
    assert (block.base_len, block.law) == (13, "point")
    assert session.drafter.gaps() == [FeatureGap("s", EPOCH, 8, 12)]
    assert session.drafter.gaps() == []
    session.sent_rows = 8
    assert same(session.draft(4), at_once(loaded, target, 13))


def test_a_request_before_its_features_gets_an_empty_block(family: Golden, target: Target) -> None:
    session = opened(family.load(), target, 9)
    (block,) = session.drafter.draft([session.request(4)])
    assert isinstance(block, DraftBlock)
    assert block.token_ids.tolist() == []
    assert session.drafter.gaps() == [FeatureGap("s", EPOCH, 0, 8)]


def test_rows_that_come_twice_or_overlap_change_nothing(family: Golden, target: Target) -> None:
    loaded = family.load()
    session = opened(loaded, target, 10)
    session.send_features(6)
    for start in (0, 3, 6):
        session.sent_rows = start
        session.send_features(9)
    assert same(session.draft(4), at_once(loaded, target, 10))


def test_features_may_run_ahead_of_the_tokens(family: Golden, target: Target) -> None:
    loaded = family.load()
    session = opened(loaded, target, 14)
    session.send_features()  # of rows 0..12
    session.tokens = TEXT[:10]
    (block,) = session.drafter.draft([session.request(4)])
    assert isinstance(block, DraftBlock)
    assert same(block, at_once(loaded, target, 10))
    session.tokens = TEXT[:14]
    assert same(session.draft(4), at_once(loaded, target, 14))


def test_the_same_request_again_gets_the_same_block(family: Golden, target: Target) -> None:
    session = opened(family.load(), target, 12)
    first = session.draft(4)
    for _ in range(2):
        session.sent_tokens = 5
        assert same(session.draft(4), first)


def test_an_older_request_is_answered_from_its_own_history(family: Golden, target: Target) -> None:
    loaded = family.load()
    session = opened(loaded, target, 14)
    session.draft(4)
    older = replace(session.request(4), base_len=11, new_tokens=as_tokens(TEXT[8:11]))
    (block,) = session.drafter.draft([older])
    assert isinstance(block, DraftBlock)
    if not len(block.token_ids):  # a chain starts from a row that it no longer has: asked for, then as ever
        assert session.drafter.gaps() == [FeatureGap("s", EPOCH, 9, 10)]
        session.tokens, session.sent_tokens, session.sent_rows = TEXT[:11], 11, 9
        block = session.draft(4)
    assert same(block, at_once(loaded, target, 11))


def test_depth_0_reads_nothing_and_later_rounds_go_on(family: Golden, target: Target) -> None:
    loaded = family.load()
    session = opened(loaded, target, 9)
    assert session.draft(0).token_ids.tolist() == []
    assert session.drafter.cached_rows("s") == 0
    session.tokens = TEXT[:13]
    assert same(session.draft(4), at_once(loaded, target, 13))


def test_masked_rows_are_never_waited_for_and_positions_stay_absolute(family: Golden, target: Target) -> None:
    """A prefix whose features nobody has: rows before `first` are as if they were not there."""
    loaded = recording(family.load())
    session = opened(loaded, target, 14)
    session.first = 5
    assert len(session.draft(4).token_ids) == 4
    model = loaded.model
    assert isinstance(model, RecordingBlockModel | RecordingChainModel)
    assert session.drafter.cached_rows("s") == 8
    if isinstance(model, RecordingBlockModel):
        assert model.extended[0][1].tolist() == list(range(5, 13))
        assert model.batches[0].positions[0] == 13
    else:
        assert model.batches[0].positions.tolist() == list(range(5, 13))
        assert model.batches[1].positions.tolist() == [13]


# --- new verifiers and routers --------------------------------------------------------------------------------------


def test_rows_of_a_lost_verifier_count_only_as_far_as_tokens_were_confirmed(family: Golden, target: Target) -> None:
    """It had committed other tokens, which the router never heard of."""
    loaded = family.load()
    session = opened(loaded, target, 9)
    session.draft(4)
    session.tokens = [*TEXT[:9], 7, 7, 7, 7]
    session.send_features()  # rows 8..11, of tokens that nobody will confirm
    session.tokens, session.epoch = TEXT[:13], Epoch(0, 1)
    (block,) = session.drafter.draft([session.request(4)])
    assert isinstance(block, DraftBlock)
    assert block.token_ids.tolist() == []
    (gap,) = session.drafter.gaps()
    assert (gap.start, gap.stop) == (9, 12)  # row 8 is of the anchor, which the first request confirmed
    session.sent_rows = 9
    assert same(session.draft(4), at_once(loaded, target, 13))


def test_features_of_an_older_epoch_are_left_aside(family: Golden, target: Target) -> None:
    session = opened(family.load(), target, 9)
    session.epoch = Epoch(0, 1)
    session.draft(4)
    session.tokens, session.epoch = TEXT[:12], Epoch(0, 0)
    session.send_features()
    session.epoch = Epoch(0, 1)
    session.drafter.draft([session.request(4)])
    assert [(gap.start, gap.stop) for gap in session.drafter.gaps()] == [(8, 11)]


@pytest.mark.parametrize("first_comes", ["request", "features"])
def test_a_new_router_starts_the_session_over(family: Golden, target: Target, first_comes: str) -> None:
    loaded = family.load()
    session = opened(loaded, target, 14)
    session.draft(4)
    changed = [*TEXT[:12], 3]
    session.tokens, session.epoch, session.sent_tokens, session.sent_rows = changed, Epoch(1, 0), 0, 0
    if first_comes == "request":
        session.drafter.draft([session.request(4)])
        session.sent_tokens = 0
    block = session.draft(4)
    fresh = Session(drafter_of(loaded), loaded, target, changed)
    assert same(block, fresh.draft(4))


def test_a_session_that_is_not_known_is_stale(family: Golden, target: Target) -> None:
    session = opened(family.load(), target, 12)
    session.sent_tokens = 10
    (answer,) = session.drafter.draft([session.request(4)])
    assert answer == Stale("s", 12, EPOCH, 0)


# --- many sessions ---------------------------------------------------------------------------------------------------


def together(
    loaded: LoadedDrafter, target: Target, samplings: list[SamplingParams], lengths: list[int], depths: list[int]
) -> list[DraftBlock]:
    drafter = drafter_of(loaded)
    sessions = [
        Session(drafter, loaded, target, TEXT[:length], sampling, session_id=str(place))
        for place, (length, sampling) in enumerate(zip(lengths, samplings, strict=True))
    ]
    for session in sessions:
        session.send_features()
    answers = drafter.draft([one.request(depth) for one, depth in zip(sessions, depths, strict=True)])
    assert all(isinstance(answer, DraftBlock) for answer in answers)
    return answers  # type: ignore[return-value]  # just checked


def test_a_batch_drafts_what_its_sessions_draft_alone(family: Golden, target: Target) -> None:
    """Of different lengths, depths and rules."""
    loaded = family.load()
    samplings = [
        SamplingParams(64),
        SamplingParams(64, temperature=0.8, key=11),
        SamplingParams(64, temperature=1.2, key=12, rule="ratio", top_k=30),
        SamplingParams(64, temperature=0.5, key=13, top_p=0.9),
        SamplingParams(64, temperature=1.0, key=14, rule="ratio"),
    ]
    lengths, depths = [2, 9, 14, 22, 17], [4, 2, 3, 1, 0]
    for one, sampling, length, depth in zip(
        together(loaded, target, samplings, lengths, depths), samplings, lengths, depths, strict=True
    ):
        alone = opened(loaded, target, length, sampling).draft(depth)
        assert len(one.token_ids) == depth
        assert one.law == alone.law
        assert same(one, alone)
        assert (one.support is None) == (alone.support is None)
        if one.support is not None and alone.support is not None:
            assert one.support.ids.tolist() == alone.support.ids.tolist()


def test_long_prompts_are_read_over_several_requests(family: Golden, target: Target) -> None:
    loaded = family.load()
    text = (TEXT * 5)[:90]
    expected = Session(drafter_of(loaded), loaded, target, text).draft(4)
    pieces = drafter_of(loaded, prefill_rows=40)
    session = Session(pieces, loaded, target, text)
    read = []
    for _ in range(3):
        block = session.draft(4)
        read.append(pieces.cached_rows("s"))
        session.sent_tokens = 90
    assert read == [40, 80, 89]
    assert same(block, expected)


def test_pages_are_taken_from_whoever_was_idle_longest(family: Golden, target: Target) -> None:
    loaded = family.load(num_pages=12)  # 48 rows: two sessions, never three
    drafter = drafter_of(loaded)
    sessions = [Session(drafter, loaded, target, TEXT[:16], session_id=name) for name in "abc"]
    for session in sessions:
        assert len(session.draft(4).token_ids) == 4
    assert drafter.sessions == 2
    (answer,) = drafter.draft([sessions[0].request(4)])
    assert isinstance(answer, Stale)


def test_features_that_nobody_asks_drafts_for_are_bounded(target: Target) -> None:
    loaded = Golden("dflash").load()
    drafter = drafter_of(loaded)
    rows = np.zeros((60, 64), np.float32)
    for place in range(40):
        drafter.take(message(str(place), EPOCH, drafter.feature_id, 0, rows))
    assert drafter.sessions <= 256 // 60


def test_texts_longer_than_the_drafters_positions_get_empty_blocks(family: Golden, target: Target) -> None:
    loaded = family.load()
    short = replace(loaded.description, max_positions=14)
    drafter = drafter_of(replace(loaded, description=short))
    session = Session(drafter, loaded, target, TEXT[:22])
    assert session.draft(4).token_ids.tolist() == []
    assert session.drafter.sessions == 0


# --- what a request asks for -----------------------------------------------------------------------------------------


def test_coupled_drafts_race_with_the_requests_own_noise(family: Golden, target: Target) -> None:
    """The first token is what the target would choose from the draft's logits."""
    loaded = recording(family.load())
    if family.name == "dflash_zlab":
        pytest.skip("proposes the most likely tokens by default")
    sampling = SamplingParams(64, temperature=0.9, key=77, choice=1)
    block = at_once(loaded, target, 12, sampling)
    model = loaded.model
    assert isinstance(model, RecordingBlockModel | RecordingChainModel)
    if isinstance(model, RecordingBlockModel):
        code, _ = loaded.head.code(None, torch.tensor([TEXT[11]]), model.outputs[0].hidden[:, 0])
        raw = model.outputs[0].base_logits[:, 0] + code @ loaded.head.out.T
    else:
        raw = model.outputs[0].logits[-1:]
    raw = raw if loaded.vocabulary is None else loaded.vocabulary.spread(raw)
    rows = SamplingRows.of([sampling], [12])
    assert block.law == "point"
    assert block.token_ids[0] == choose_tokens(raw, rows, rows.base_len).item()


def test_drafts_of_the_ratio_rule_come_from_the_support_that_they_ship(family: Golden, target: Target) -> None:
    block = at_once(family.load(), target, 12, SamplingParams(64, temperature=0.9, key=5, rule="ratio"))
    if family.name == "dflash_zlab":
        assert (block.law, block.support) == ("point", None)
        return
    assert block.law == "sparse"
    assert block.support is not None
    ids, starts = block.support.ids.tolist(), block.support.starts.tolist()
    assert len(starts) == len(block.token_ids) + 1
    for place, token in enumerate(block.token_ids.tolist()):
        row = slice(starts[place], starts[place + 1])
        assert token in ids[row]
        assert int((block.support.counts[row].astype(np.int64) + 1).sum()) == 2**16


def test_temperature_changes_the_drafts_law(target: Target) -> None:
    """A block drafter that ignored it would ship the same distributions."""
    loaded = Golden("dspark_markov").load()
    supports = []
    for temperature in (0.1, 0.7, 1.5):
        block = at_once(loaded, target, 12, SamplingParams(64, temperature=temperature, key=5, rule="ratio"))
        assert block.support is not None
        first = block.support.first(1)
        supports.append(int(first.counts.max()))
    assert supports[0] > supports[1] > supports[2]


def test_banned_tokens_are_not_drafted(family: Golden, target: Target) -> None:
    loaded = family.load()
    plain = at_once(loaded, target, 12).token_ids.tolist()
    banned = SamplingParams(64, logit_bias=tuple((token, -1e9) for token in sorted(set(plain))))
    assert not set(plain) & set(at_once(loaded, target, 12, banned).token_ids.tolist())


def test_a_chain_ends_with_a_drafted_stop_token(target: Target) -> None:
    loaded = Golden("eagle3").load()
    plain = at_once(loaded, target, 12).token_ids.tolist()
    stop = plain[1]
    ended = at_once(loaded, target, 12, SamplingParams(64, stop_token_ids=(stop,))).token_ids.tolist()
    assert ended == plain[: plain.index(stop) + 1]


# --- what others get wrong -------------------------------------------------------------------------------------------


def test_features_of_another_kind_or_shape_are_refused_with_both_values(target: Target) -> None:
    drafter = drafter_of(Golden("dflash").load())
    rows = np.zeros((3, 64), np.float32)
    with pytest.raises(ProtocolError, match=f"features f00, this drafter reads {drafter.feature_id}"):
        drafter.take(message("s", EPOCH, "f00", 0, rows))
    with pytest.raises(ProtocolError, match="width 32, expected 64"):
        drafter.take(message("s", EPOCH, drafter.feature_id, 0, rows[:, :32]))
    with pytest.raises(ProtocolError, match="from row -1"):
        drafter.take(message("s", EPOCH, drafter.feature_id, -1, rows))
    assert drafter.sessions == 0


def test_features_of_nan_harm_no_other_session(family: Golden, target: Target) -> None:
    loaded = family.load()
    drafter = drafter_of(loaded)
    broken = Session(drafter, loaded, target, TEXT[:9], session_id="nan")
    drafter.take(message("nan", EPOCH, drafter.feature_id, 0, np.full((8, 64), np.nan, np.float32)))
    healthy = Session(drafter, loaded, target, TEXT[:14], session_id="well")
    healthy.send_features()
    answers = drafter.draft([broken.request(4), healthy.request(4)])
    assert isinstance(answers[0], DraftBlock)
    assert set(answers[0].confidence.tolist()) <= {0.0}
    assert isinstance(answers[1], DraftBlock)
    assert same(answers[1], at_once(loaded, target, 14))


def test_the_service_contains_it_as_any_drafter(family: Golden, target: Target) -> None:
    drafter = drafter_of(family.load())
    draft_probe(drafter, "probe")
    assert drafter.sessions == 0
    request = DraftRequest("s", EPOCH, 1, 4, 4, as_tokens(TEXT[:4]), 3, SamplingParams(8))
    (answer,) = draft_contained(drafter, ["gone"], [request])
    assert isinstance(answer, DraftBlock)


def test_a_bfloat16_drafter_runs(family: Golden, target: Target) -> None:
    session = opened(family.load(dtype="bfloat16"), target, 9)
    session.loaded = family.load()  # a feature is the same float32 row, whatever the drafter computes in
    assert len(session.draft(4).token_ids) == 4


def test_opening_a_checkpoint_gives_its_kind_of_drafter_and_what_a_greeting_says_of_it(target: Target) -> None:
    opened_now = open_feature_drafter(Golden("dspark_rnn").draft_dir, GOLDEN / "target", num_pages=8)
    assert (opened_now.max_depth, opened_now.max_len, opened_now.width) == (5, 512, 64)
    assert opened_now.feature_id == Golden("dspark_rnn").load().projection.feature_id()
    assert (opened_now.sessions, opened_now.gaps()) == (0, [])


def test_point_drafts_ship_no_law_and_are_the_most_likely_tokens(family: Golden, target: Target) -> None:
    loaded = family.load()
    drafter = FeatureDrafter(proposer_of(loaded, point_drafts=True), loaded.projection.feature_id())
    session = Session(drafter, loaded, target, TEXT[:12], SamplingParams(64, temperature=1.5, key=3, rule="ratio"))
    block = session.draft(4)
    assert (block.law, block.support) == ("point", None)
    assert block.token_ids.tolist() == at_once(loaded, target, 12).token_ids.tolist()
