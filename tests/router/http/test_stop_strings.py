from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.http.stop_strings import StopStrings

text_of_few = st.text(alphabet="ab", max_size=30)
stops_of_few = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, written plainly: the stop string that ends first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    finder, shown = StopStrings(stops), ""
    for piece in pieces:
        text, stop = finder.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + finder.flush(), None


def split(text: str, cuts: set[int]) -> list[str]:
    at = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(at)]


@given(text_of_few, stops_of_few, st.sets(st.integers(1, 29)))
def test_the_first_stop_string_is_found_however_the_text_is_cut(text: str, stops: list[str], cuts: set[int]) -> None:
    assert run(split(text, cuts), stops) == first_stop(text, stops)


@given(text_of_few, stops_of_few)
def test_only_text_that_may_still_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    finder, pushed, shown = StopStrings(stops), "", ""
    for char in text:
        pushed += char
        piece, stop = finder.push(char)
        shown += piece
        if stop is not None:
            return
        held = pushed[len(shown) :]
        assert not held or any(s.startswith(held) for s in stops)
        assert not any(s.startswith(pushed[-n:]) for s in stops for n in range(len(held) + 1, len(pushed) + 1))


def test_without_stop_strings_all_text_passes_at_once() -> None:
    assert StopStrings().push("ab") == ("ab", None)
