import random

import numpy as np
import pytest

from cluster.protocol.messages import DraftBlock, DraftRequest, Epoch, SamplingParams, Stale, as_tokens
from drafter_service.prompt_lookup import IndexedText, PromptLookup

FIRST = Epoch(0, 0)


def request(
    tokens,
    new: int | None = None,
    depth: int = 4,
    session: str = "a",
    epoch: Epoch = FIRST,
    block_id: int = 1,
) -> DraftRequest:
    """The history `tokens`, of which the last `new` are shown (all by default)."""
    shown = tokens if new is None else tokens[len(tokens) - new :]
    return DraftRequest(
        session_id=session,
        epoch=epoch,
        block_id=block_id,
        base_len=len(tokens),
        prompt_len=1,
        new_tokens=as_tokens(shown),
        depth=depth,
        sampling=SamplingParams(max_tokens=100),
    )


def drafted(drafter: PromptLookup, *args, **kwargs) -> list[int]:
    (answer,) = drafter.draft([request(*args, **kwargs)])
    assert isinstance(answer, DraftBlock), answer
    return answer.token_ids.tolist()


def test_proposes_what_followed_the_same_tokens_before():
    assert drafted(PromptLookup(), [1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5, 9]


def test_a_block_answers_for_its_request_without_inventing_confidence():
    asked = request([1, 2, 3, 1, 2], depth=2, epoch=Epoch(3, 4), block_id=77)
    (block,) = PromptLookup().draft([asked])
    assert isinstance(block, DraftBlock)
    assert (block.session_id, block.epoch, block.block_id, block.base_len) == ("a", Epoch(3, 4), 77, 5)
    assert block.law == "point"
    assert block.token_ids.dtype == np.int32
    assert block.confidence.shape == (0,)


@pytest.mark.parametrize("tokens", [[7], [1, 2, 3, 4], [1, 2, 1, 3, 1]])
def test_no_earlier_occurrence_gives_an_empty_block(tokens):
    assert drafted(PromptLookup(), tokens) == []


def test_the_longest_match_wins_over_a_more_recent_shorter_one():
    text = [5, 1, 2, 3, 70, 1, 9, 2, 3, 80, 0, 5, 1, 2, 3]
    assert drafted(PromptLookup(), text, depth=1) == [70]


def test_of_equally_long_matches_the_most_recent_wins():
    assert drafted(PromptLookup(), [1, 2, 70, 0, 1, 2, 80, 0, 1, 2], depth=1) == [80]


def test_repetitive_text_is_continued_past_its_end():
    assert drafted(PromptLookup(), [4, 5, 6] * 3, depth=7) == [4, 5, 6, 4, 5, 6, 4]
    assert drafted(PromptLookup(), [8] * 5, depth=3) == [8, 8, 8]


def test_depth_is_limited_by_request_and_drafter():
    text = [*range(20), 0, 1]
    assert drafted(PromptLookup(max_depth=3), text, depth=10) == [2, 3, 4]
    assert drafted(PromptLookup(max_depth=3), text, depth=1) == [2]
    assert drafted(PromptLookup(), text, depth=0) == []


def test_a_session_grows_by_its_new_tokens_only():
    drafter = PromptLookup()
    text = [1, 2, 3, 4]
    assert drafted(drafter, text) == []
    assert drafted(drafter, [*text, 1, 2], new=2) == [3, 4, 1, 2]
    assert drafted(drafter, [*text, 1, 2, 3], new=1) == [4, 1, 2, 3]


def test_tokens_missing_in_between_are_answered_with_what_is_held():
    drafter = PromptLookup()
    drafted(drafter, [1, 2, 3], epoch=Epoch(1, 1))
    (answer,) = drafter.draft([request([1, 2, 3, 4, 5], new=1, epoch=Epoch(1, 2), block_id=9)])
    assert answer == Stale("a", 9, Epoch(1, 1), 3)


def test_an_unknown_session_is_stale_unless_the_whole_history_is_shown():
    (answer,) = PromptLookup().draft([request([1, 2, 3], new=2)])
    assert isinstance(answer, Stale)
    assert answer.have_len == 0


def test_a_shorter_history_rolls_back():
    drafter = PromptLookup()
    drafted(drafter, [1, 2, 3, 1, 2, 5, 1, 2])
    assert drafted(drafter, [1, 2, 3, 1, 2], new=0, depth=1) == [3]


def test_a_different_history_replaces_what_disagrees():
    drafter = PromptLookup()
    drafted(drafter, [1, 2, 50, 9, 8])
    assert drafted(drafter, [1, 2, 60, 9, 1, 2], epoch=Epoch(1, 0), depth=1) == [60]


def test_another_router_must_show_the_whole_history():
    """Its predecessor may have committed tokens that it never saw, so what is held is not vouched for."""
    drafter = PromptLookup()
    drafted(drafter, [1, 2, 50, 1, 2], epoch=Epoch(0, 5))
    (answer,) = drafter.draft([request([1, 2, 60, 1, 2, 7], new=1, epoch=Epoch(1, 0))])
    assert answer == Stale("a", 1, Epoch(0, 5), 0)
    assert drafted(drafter, [1, 2, 60, 1, 2], epoch=Epoch(1, 0), depth=1) == [60]


def test_a_change_of_verifier_keeps_the_history():
    drafter = PromptLookup()
    drafted(drafter, [1, 2, 50], epoch=Epoch(0, 0))
    assert drafted(drafter, [1, 2, 50, 1, 2], new=2, epoch=Epoch(0, 1), depth=1) == [50]


def test_a_message_from_an_earlier_epoch_is_stale():
    drafter = PromptLookup()
    drafted(drafter, [1, 2, 3], epoch=Epoch(2, 0))
    (answer,) = drafter.draft([request([1, 2, 3, 4], new=1, epoch=Epoch(1, 9))])
    assert answer == Stale("a", 1, Epoch(2, 0), 3)


def test_the_text_of_one_session_never_reaches_another():
    drafter = PromptLookup()
    canary = list(range(100, 120))
    drafted(drafter, canary, session="a")
    assert drafted(drafter, canary[:10], session="b") == []
    assert drafted(drafter, [*canary[:10], 1], new=1, session="b") == []


def test_closed_sessions_are_forgotten():
    drafter = PromptLookup()
    drafted(drafter, [1, 2, 3], session="a")
    drafted(drafter, [1, 2, 3], session="b")
    drafter.close("a")
    drafter.close("never opened")
    assert drafter.sessions == 1
    assert isinstance(drafter.draft([request([1, 2, 3, 4], new=1, session="a")])[0], Stale)


def test_beyond_the_limit_the_session_that_was_idle_longest_is_forgotten():
    drafter = PromptLookup(max_sessions=2)
    for session in "abcd":
        drafted(drafter, [1, 2, 3], session=session)
    assert drafter.sessions == 3  # one more than the limit, for the health probe
    assert isinstance(drafter.draft([request([1, 2, 3, 4], new=1, session="a")])[0], Stale)
    assert isinstance(drafter.draft([request([1, 2, 3, 4], new=1, session="b")])[0], DraftBlock)


def test_a_batch_is_answered_in_order():
    answers = PromptLookup().draft(
        [
            request([1, 2, 3, 1, 2], session="a", depth=1),
            request([1, 2], new=1, session="b"),
            request([4, 5, 6, 4, 5], session="c", depth=1),
        ]
    )
    assert [answer.session_id for answer in answers] == ["a", "b", "c"]
    assert [type(answer) for answer in answers] == [DraftBlock, Stale, DraftBlock]


def by_scanning(tokens: list[int], depth: int, longest: int, shortest: int) -> list[int]:
    """The definition, by scanning everything."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for place in range(len(tokens) - 1, size - 1, -1):
            if tokens[place - size : place] == tokens[-size:]:
                period = len(tokens) - place
                return [tokens[place + i % period] for i in range(depth)]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_the_index_equals_a_full_scan_after_any_appends_and_rollbacks(seed):
    rng = random.Random(seed)
    text, plain = IndexedText(Epoch(0, 0), ngram=2), []
    for _ in range(60):
        if plain and rng.random() < 0.3:
            plain = plain[: rng.randrange(len(plain) + 1)]
            text.roll_back(len(plain))
        new = [rng.randrange(4) for _ in range(rng.randrange(4))]
        plain += new
        text.append(new)
        assert text.tokens == plain
        assert text.continuation(3, 5, max_candidates=1000) == by_scanning(plain, 3, 5, 2)


def test_rolling_back_to_nothing_leaves_nothing():
    text = IndexedText(Epoch(0, 0), ngram=2)
    text.append([1, 2, 1, 2, 3])
    text.roll_back(0)
    assert not text._newest
    assert not text._older
