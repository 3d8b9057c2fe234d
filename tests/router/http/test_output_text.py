from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.detokenizer import WindowDetokenizer
from router.http.output_text import OutputText
from router.http.stop_strings import StopStrings

VOCABULARY = ["a", "b", "c", "ab", "bc", "abc", ""]


def output(stops: list[str], include_stop: bool = False) -> OutputText:
    detokenizer = WindowDetokenizer(lambda ids: "".join(VOCABULARY[i] for i in ids))
    return OutputText(detokenizer, StopStrings(stops), include_stop)


def run(bursts: list[list[str]], stops: list[str], include_stop: bool = False) -> tuple[str, int, str | None]:
    """(text, kept tokens, stop) after the bursts, given as tokens' texts."""
    text = output(stops, include_stop)
    shown = "".join(text.push([VOCABULARY.index(token) for token in burst]) for burst in bursts)
    shown += text.finish()
    return shown, text.kept_tokens, text.stop


@pytest.mark.parametrize(
    ("bursts", "cut", "kept"),
    [
        ([["a", "b", "c"]], "", 0),
        ([["c", "a", "b", "c"]], "c", 1),
        ([["c", "ab", "c"]], "c", 1),
        ([["c", "abc", "c"]], "c", 1),
        ([["c", "a"], ["b", "c"]], "c", 1),
        ([["c", "a"], ["bc"]], "c", 1),
    ],
)
def test_a_stop_string_cuts_inside_a_burst_inside_a_token_and_across_bursts(
    bursts: list[list[str]], cut: str, kept: int
) -> None:
    assert run(bursts, ["ab"]) == (cut, kept, "ab")


@pytest.mark.parametrize(
    ("bursts", "kept"), [([["c", "a", "b", "c"]], 3), ([["c", "ab", "c"]], 2), ([["c", "a"], ["bc"]], 3)]
)
def test_an_included_stop_string_keeps_its_tokens(bursts: list[list[str]], kept: int) -> None:
    assert run(bursts, ["ab"], include_stop=True) == ("cab", kept, "ab")


tokens = st.lists(st.sampled_from(VOCABULARY), max_size=20)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=2)


@given(tokens, stop_lists, st.booleans(), st.sets(st.integers(1, 19)))
def test_the_result_does_not_depend_on_how_tokens_are_cut_into_bursts(
    answer: list[str], stops: list[str], include: bool, cuts: set[int]
) -> None:
    at = [0, *sorted(c for c in cuts if c < len(answer)), len(answer)]
    bursts = [answer[a:b] for a, b in pairwise(at)]
    assert run(bursts, stops, include) == run([answer], stops, include)


@given(tokens, stop_lists)
def test_text_and_count_never_go_back_and_the_text_never_holds_a_stop_string(
    answer: list[str], stops: list[str]
) -> None:
    text, shown, counts = output(stops), "", [0]
    for token in answer:
        shown += text.push([VOCABULARY.index(token)])
        counts.append(text.kept_tokens)
        assert not any(stop in shown for stop in stops)
    shown += text.finish()
    counts.append(text.kept_tokens)
    assert counts == sorted(counts)
    assert "".join(answer).startswith(shown)
    assert not any(stop in shown for stop in stops)
    if text.stop is None:
        assert (shown, text.kept_tokens) == ("".join(answer), len(answer))
    else:
        # Kept are exactly the tokens that begin before the cut.
        begins = ["".join(answer[:i]) for i in range(len(answer))]
        assert text.kept_tokens == sum(len(begin) < len(shown) for begin in begins)


def test_held_back_text_is_shown_at_the_end() -> None:
    assert run([["c", "a"]], ["ab"]) == ("ca", 2, None)
