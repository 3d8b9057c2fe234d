"""Prompts of our own for load: three kinds, of any length, never twice the same. All chance is the caller's.

Texts are put together of few words on purpose: a copy repeats its prompt, an open text is sampled on from it, and a
chat begins like every other chat of its kind, as real ones do.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import TypeAlias

Prompt: TypeAlias = str | tuple[Mapping[str, str], ...]  # a text to continue, or a chat

WHO = (
    "the fisherman of the village", "an old clockmaker", "the captain of the ferry", "my grandmother",
    "the youngest of three sisters", "a travelling musician", "the keeper of the lighthouse", "a tired baker",
    "the teacher from the valley", "a painter without money", "the gardener of the abbey", "a retired engineer",
)  # fmt: skip
DID = (
    "carried", "repaired", "sold", "found", "painted", "measured", "forgot", "described", "borrowed", "counted",
    "polished", "hid",
)  # fmt: skip
WHAT = (
    "a small wooden boat", "eleven copper kettles", "the map of the northern coast", "a basket of green apples",
    "the letters from the war", "a clock that ran backwards", "the oldest violin in town", "two barrels of salt",
    "a lantern with blue glass", "the keys of the granary", "a book about comets", "the bell of the chapel",
)  # fmt: skip
WHERE = (
    "near the stone bridge", "behind the harbour", "in the middle of the night", "on the first day of spring",
    "at the end of the long road", "under the lime trees", "before the storm came", "while the others slept",
    "in front of the whole council", "during the coldest winter", "by the light of the moon", "after the market closed",
)  # fmt: skip
SYSTEM = {"role": "system", "content": "You are a patient assistant. Answer in plain words and keep to the facts."}
QUESTIONS = (
    "Who is mentioned first?", "What happened, in one sentence?", "Tell the story again, with a happy end.",
    "Which objects appear in it?", "What might happen next?", "Write a title and a short summary.",
)  # fmt: skip


def passage(words: int, chance: Random) -> str:
    """Whole sentences, at least `words` words together."""
    sentences: list[str] = []
    length = 0
    while length < words:
        parts = [chance.choice(column) for column in (WHO, DID, WHAT, WHERE)]
        sentence = " ".join(parts)
        sentences.append(sentence[0].upper() + sentence[1:] + ".")
        length += sentence.count(" ") + 1
    return " ".join(sentences)


def copying(words: int, chance: Random) -> Prompt:
    return (_user(f"Copy this text word for word:\n{passage(words, chance)}"),)


def open_text(words: int, chance: Random) -> Prompt:
    return f"{passage(words, chance)} The next morning {chance.choice(WHO)}"


def chatting(words: int, chance: Random) -> Prompt:
    """A second question about a passage, behind an answer to the first."""
    first = f"{passage(words, chance)}\n\n{chance.choice(QUESTIONS)}"
    answer = {"role": "assistant", "content": passage(8, chance)}
    return (SYSTEM, _user(first), answer, _user(chance.choice(QUESTIONS)))


# A prompt of at least so many words.
MIXES: Mapping[str, Callable[[int, Random], Prompt]] = {"copy": copying, "open": open_text, "chat": chatting}


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
