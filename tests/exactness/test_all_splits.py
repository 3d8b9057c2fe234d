"""The text never depends on how it was cut into blocks: every split of 8 tokens, through the real engine at once."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.protocol.messages import SamplingParams
from cluster.simulator.scripted_target import ScriptedLaw, ScriptedTarget
from tests.verifier_service.rounds import Player, engine

LAW = ScriptedLaw(vocab_size=32, seed=23, spread=6.0)
PROMPT = [7, 1, 19]
LENGTH = 8


def splits(length: int) -> Iterator[list[int]]:
    """Every way of cutting `length` tokens into parts of at least one."""
    for cuts in itertools.product([False, True], repeat=length - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), length]
        yield [end - start for start, end in itertools.pairwise(edges)]


def exact(right: list[int], later: list[int]) -> list[int]:
    """The block ends where its part ends."""
    return right


def then_wrong(right: list[int], later: list[int]) -> list[int]:
    """The part ends by a rejection; what follows it is right again and must not count."""
    return [*right, (later[0] + 1) % LAW.vocab_size, *later[1:3]] if len(later) > 1 else right


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0, "key": 5},
    "coupled, cut and hot": {"temperature": 1.7, "key": 2**64 - 3, "choice": 4, "top_k": 12, "top_p": 0.9},
}


@pytest.mark.parametrize("ended", [exact, then_wrong])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_every_split_gives_the_text_of_no_speculation(
    sampling: dict[str, Any], ended: Callable[[list[int], list[int]], list[int]]
) -> None:
    params = SamplingParams(max_tokens=LENGTH, **sampling)
    text = LAW.text(PROMPT, params)
    ways = list(splits(LENGTH))
    player = Player(engine(ScriptedTarget(LAW, num_pages=1024), max_sessions=len(ways)))
    for number in range(len(ways)):
        assert player.open(str(number), PROMPT, max_tokens=LENGTH, **sampling) == []
    play(player, ways, text, ended)
    for number, parts in enumerate(ways):
        session = player.sessions[str(number)]
        assert session.output == text, parts
        assert [result.num_accepted for result in session.results] == [part - 1 for part in parts]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_stop_token_ends_every_split_at_the_same_place(sampling: dict[str, Any]) -> None:
    length = 6
    alone = LAW.text(PROMPT, SamplingParams(max_tokens=length, **sampling))
    for place in range(length):
        stop = (alone[place],)
        text = LAW.text(PROMPT, SamplingParams(max_tokens=length, stop_token_ids=stop, **sampling))
        ways = list(splits(length))
        player = Player(engine(ScriptedTarget(LAW, num_pages=1024), max_sessions=len(ways)))
        for number in range(len(ways)):
            assert player.open(str(number), PROMPT, max_tokens=length, stop_token_ids=stop, **sampling) == []
        play(player, ways, alone, exact)
        for session in player.sessions.values():
            assert session.output == text
            assert session.results[-1].finish_reason == "stop"


def play(
    player: Player, ways: list[list[int]], text: list[int], ended: Callable[[list[int], list[int]], list[int]]
) -> None:
    """Every session to its end, each round drafting one part of its split."""
    while going := {name: session for name, session in player.sessions.items() if not session.finished}:
        waiting = set(going)
        for name, session in going.items():
            done = len(session.output)
            part = ways[int(name)][len(session.results)]
            right = text[done : done + part - 1]
            assert player.ask(name, ended(right, text[done + part - 1 :])) == []
        while waiting:
            for result in player.engine.step():
                player.commit(result)
                waiting.discard(result.session_id)
