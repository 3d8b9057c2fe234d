"""The prompts of `outrider check`: short, of many kinds, and ours. Data only.

Speculation fails in different places on different text: long copies fill every block, prose rejects most drafts,
scripts without spaces split characters between tokens.
"""

from dataclasses import dataclass

from cluster.check.answer import Messages

PARAGRAPH = (
    "The lamp room of the lighthouse holds three brass clocks, a ladder with nine rungs, and a logbook in which the "
    "keeper writes the weather, the ships that passed, and the hour at which the oil was filled."
)
# A model that can copy at all copies here, so that whole blocks of a lookup drafter are accepted.
COPY = f"{PARAGRAPH}\n\n{PARAGRAPH}\n\nThe lamp room of the lighthouse"
# Two likely continuations at every step, and a history to look them up in: three tokens have a law that can be counted,
# and drafts that are accepted about half the time.
YES_NO = "yes no no yes no yes yes yes no no yes no yes no no no yes yes no yes yes no no yes"
STORY = "Once upon a time, in a village between two rivers, there lived"


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    prompt: str | Messages
    max_tokens: int


def _chat(*turns: str) -> Messages:
    """Turns of user and assistant in alternation."""
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


SHORT_ANSWER = _chat("What is the capital of France? Answer with one short sentence.")

PROMPTS = (
    Prompt("question", SHORT_ANSWER, 32),
    Prompt(
        "second turn",
        _chat("Name three kinds of cheese.", "Brie, Gouda and Feta.", "Say the same list again, in reverse order."),
        32,
    ),
    Prompt(
        "with a system message",
        [{"role": "system", "content": "You answer in rhyme."}, *_chat("Why does it rain in autumn?")],
        32,
    ),
    Prompt("prose", "We moved to the coast last spring. On a clear morning you can see", 48),
    Prompt("one word", "The", 24),
    Prompt(
        "code",
        "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n",
        32,
    ),
    Prompt(
        "JSON list",
        '[{"id": 1, "name": "Ada", "active": true}, {"id": 2, "name": "Ben", "active": true}, {"id": 3, "name":',
        48,
    ),
    Prompt("one word, 48 times", "serving" * 48, 32),
    Prompt("numbered list", "".join(f"{i}. The answer to question {i} is yes.\n" for i in range(1, 8)) + "8.", 48),
    Prompt("copied paragraph", COPY, 48),
    Prompt("Russian", "Москва — столица России. Париж — столица Франции. Рим — столица", 16),
    Prompt("Chinese and emoji", "🍎 苹果\n🍌 香蕉\n🍇 葡萄\n🍎 苹果\n🍌", 16),
)
