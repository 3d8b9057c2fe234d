"""What drafters get of a session's features: committed rows, each once, in order, to whoever asked last.

The scripted target's feature of a row is its token, so what arrives shows which rows were sent.
"""

from collections.abc import Sequence

import pytest

from cluster.protocol.messages import Epoch, FeatureRequest, FeatureRows, SamplingParams
from cluster.simulator.scripted_target import ScriptedFeatures, ScriptedTarget
from tests.verifier_service.rounds import EPOCH, Player, close, engine, no_draft, open_session, verify
from verifier_service import feature_feed
from verifier_service.feature_feed import PLAIN_ROUNDS, FeatureFeed

KIND = ScriptedFeatures.FEATURE_ID


class Drafters:
    """Plays an engine with a feed; keeps what each link was sent of each session."""

    def __init__(self, limit: int = 64) -> None:
        self.target = ScriptedTarget()
        self.player = Player(engine(self.target))
        self.feed = FeatureFeed(
            self.target.features, self.player.engine.committed_rows, self.player.engine.slots, limit
        )
        self.sent: list[tuple[int, FeatureRows]] = []

    def ask(self, name: str, start: int = 0, link: int = 1, epoch: Epoch = EPOCH, kind: str = KIND) -> None:
        self.feed.ask(link, FeatureRequest(name, epoch, kind, start))

    def take(self) -> list[tuple[int, FeatureRows]]:
        new = [(link, message) for link, messages in self.feed.take().items() for message in messages]
        self.sent += new
        return new

    def rounds(self, names: Sequence[str], drafts: Sequence[Sequence[int]]) -> None:
        """One round per draft for each of the sessions."""
        for draft in drafts:
            for name in names:
                request = verify(name, len(self.player.sessions[name].tokens), draft)
                self.feed.round_asked(request)
                assert self.player.ask(name, draft) == []
            waiting = set(names)
            while waiting:
                for result in self.player.engine.step():
                    self.player.commit(result)
                    waiting.discard(result.session_id)
                self.take()

    def tokens_sent(self, name: str, link: int = 1) -> list[int]:
        """The rows as they came; fails unless they follow on one another from row 0."""
        rows: list[int] = []
        for to, message in self.sent:
            if (to, message.session_id) == (link, name):
                assert message.start == len(rows)
                assert message.width == 2
                rows += message.rows[:, 0].astype(int).tolist()
        return rows


def right(drafters: Drafters, name: str, count: int) -> list[int]:
    """The target's own next tokens."""
    return drafters.target.law.text(drafters.player.sessions[name].tokens, SamplingParams(count))


def test_every_committed_row_is_sent_once_and_no_other() -> None:
    drafters = Drafters()
    prompts = {"a": list(range(21)), "b": [7, 8, 9]}  # one of them in several chunks
    for name, prompt in prompts.items():
        drafters.ask(name)
        drafters.player.open(name, prompt)
    drafters.rounds(["a", "b"], [[], [1, 2, 3, 4], []])
    for name in prompts:
        drafters.rounds([name], [[*right(drafters, name, 2), 63, 63]])  # two accepted, two rejected
    for name in prompts:
        tokens = drafters.player.sessions[name].tokens
        assert drafters.tokens_sent(name) == tokens[:-1]
    assert drafters.feed.rows_sent == sum(len(s.tokens) - 1 for s in drafters.player.sessions.values())
    assert drafters.player.engine.counters.accepted_tokens >= 4


def test_rows_of_a_prompt_go_out_chunk_by_chunk_before_the_first_token() -> None:
    drafters = Drafters()
    drafters.player.open("a", list(range(20)))
    drafters.ask("a")
    for done in (8, 16, 19):
        assert drafters.player.engine.step() == []
        drafters.take()
        assert len(drafters.tokens_sent("a")) == done


def test_who_asks_late_gets_what_is_there_without_another_pass() -> None:
    drafters = Drafters()
    drafters.player.open("a", list(range(20)))
    drafters.rounds(["a"], [[], []])
    rows = drafters.player.engine.counters.rows
    drafters.ask("a")
    drafters.take()
    assert drafters.tokens_sent("a") == drafters.player.sessions["a"].tokens[:-1]
    assert drafters.player.engine.counters.rows == rows


def test_rows_asked_for_again_are_sent_again_from_there() -> None:
    drafters = Drafters()
    drafters.ask("a")
    drafters.player.open("a", list(range(10)))
    drafters.rounds(["a"], [[], []])
    drafters.ask("a", start=6)
    ((_, again),) = drafters.take()
    assert again.start == 6
    assert again.rows[:, 0].astype(int).tolist() == drafters.player.sessions["a"].tokens[6:-1]
    assert drafters.take() == []


def test_rows_that_are_not_there_yet_may_be_asked_for() -> None:
    drafters = Drafters()
    drafters.player.open("a", list(range(10)))
    drafters.rounds(["a"], [[]])
    drafters.ask("a", start=11)  # the prompt's rows 0 .. 9 and one more have not been run
    assert drafters.take() == []
    drafters.rounds(["a"], [[], [], []])
    assert drafters.sent[0][1].start == 11


def test_the_link_that_asks_last_gets_the_rows() -> None:
    drafters = Drafters()
    drafters.ask("a", link=1)
    drafters.player.open("a", list(range(5)))
    drafters.rounds(["a"], [[]])
    drafters.ask("a", link=2)
    drafters.take()
    drafters.rounds(["a"], [[]])
    assert len(drafters.tokens_sent("a", link=1)) == 5
    assert drafters.tokens_sent("a", link=2) == drafters.player.sessions["a"].tokens[:-1]


def test_a_link_that_left_gets_nothing_more() -> None:
    drafters = Drafters()
    drafters.ask("a")
    drafters.player.open("a", list(range(5)))
    drafters.feed.left(1)
    drafters.rounds(["a"], [[]])
    assert drafters.sent == []


def test_a_session_that_runs_without_drafts_keeps_its_rows_until_they_are_asked_for() -> None:
    drafters = Drafters()
    drafters.ask("a")
    drafters.player.open("a", list(range(5)))
    drafters.rounds(["a"], [[]] * (PLAIN_ROUNDS + 3))
    _, last = drafters.sent[-1]
    sent = drafters.tokens_sent("a")
    assert (last.start, len(last.rows), last.width) == (len(sent), 0, 2)
    assert len(sent) < len(drafters.player.sessions["a"].tokens) - 1
    drafters.ask("a", start=len(sent))
    drafters.take()
    assert drafters.tokens_sent("a") == drafters.player.sessions["a"].tokens[:-1]


def test_now_and_then_a_round_without_a_draft_stops_nothing() -> None:
    drafters = Drafters()
    drafters.ask("a")
    drafters.player.open("a", list(range(5)))
    drafters.rounds(["a"], [*([[]] * (PLAIN_ROUNDS - 1)), [1], *([[]] * (PLAIN_ROUNDS - 1))])
    assert drafters.tokens_sent("a") == drafters.player.sessions["a"].tokens[:-1]


def test_a_new_life_of_the_session_is_asked_for_by_its_own_epoch() -> None:
    drafters, later = Drafters(), Epoch(1, 2)
    drafters.ask("a")
    drafters.player.open("a", list(range(5)))
    drafters.rounds(["a"], [[]])
    drafters.player.engine.handle(open_session("a", [1, 2, 3, 4], epoch=later))
    drafters.player.engine.step()
    assert drafters.take() == []
    drafters.ask("a", epoch=later)
    ((_, rows),) = drafters.take()
    assert rows.epoch == later
    assert rows.rows[:, 0].astype(int).tolist() == [1, 2, 3]
    drafters.ask("a", epoch=EPOCH, link=9)  # from before the move
    assert drafters.take() == []


def test_what_is_asked_of_sessions_that_never_come_is_bounded() -> None:
    drafters = Drafters(limit=2)
    for name in "abc":
        drafters.ask(name)
    for name in "abc":
        drafters.player.open(name, list(range(5)))
    drafters.rounds(list("abc"), [[]])
    assert {message.session_id for _, message in drafters.sent} == {"b", "c"}


def test_an_ended_session_is_forgotten() -> None:
    drafters = Drafters()
    drafters.ask("a")
    drafters.player.open("a", list(range(5)))
    drafters.rounds(["a"], [[]])
    drafters.player.engine.handle(close("a"))
    drafters.take()
    drafters.player.open("a", list(range(5)))
    drafters.rounds(["a"], [[]])
    assert drafters.tokens_sent("a") == list(range(5))  # those before its end


def test_features_that_are_not_kept_are_never_sent() -> None:
    drafters = Drafters()
    drafters.ask("a", kind="other")
    drafters.player.open("a", list(range(5)))
    drafters.rounds(["a"], [[]])
    assert drafters.sent == []


def test_much_at_once_goes_out_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_feed, "BATCH_BYTES", 5 * 2 * 4)  # five rows
    drafters = Drafters()
    for name, prompt in {"a": range(9), "b": range(20, 28)}.items():
        drafters.player.open(name, list(prompt))
    drafters.rounds(["a", "b"], [[]])
    for name in "ab":
        drafters.ask(name)
    sizes = []
    while new := drafters.take():
        sizes.append(sum(len(message.rows) for _, message in new))
        assert drafters.feed.behind == (sum(sizes) < 17)
    assert sizes == [5, 5, 5, 2]
    assert drafters.tokens_sent("a") == list(range(9))
    assert drafters.tokens_sent("b") == list(range(20, 28))


def test_a_session_plays_to_its_end_under_the_feed() -> None:
    drafters = Drafters()
    drafters.ask("a")
    drafters.player.open("a", list(range(12)))
    text = drafters.player.finish(no_draft)["a"]
    assert text == drafters.target.law.text(list(range(12)), open_session("a", [0]).sampling)
    assert drafters.take() == []
