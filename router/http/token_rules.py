"""What a request says of single tokens: biases, bans, penalties and least length, as the target takes them.

Pure. The invariant: every id that comes out is in the vocabulary, and some token stays possible as far as can be seen.
"""

import re
from collections.abc import Sequence
from typing import Any, TypedDict

from cluster.protocol.errors import InvalidRequest
from router.http.prompts import check_token_ids
from router.http.schema import MAX_BAD_WORD_CHARS, MAX_BIAS, MAX_BIASES, GenerationFields
from router.http.text_codec import TextCodec


class TokenRules(TypedDict):
    """Fields of SamplingParams."""

    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    bad_words: tuple[tuple[int, ...], ...]
    allowed_token_ids: tuple[int, ...]
    min_tokens: int


def token_rules(
    fields: GenerationFields, max_tokens: int, stop_token_ids: Sequence[int], codec: TextCodec
) -> TokenRules:
    """Raises InvalidRequest."""
    defaults, asked = codec.defaults, fields.repetition_penalty
    rules = TokenRules(
        min_p=defaults.min_p if fields.min_p is None else fields.min_p,
        repetition_penalty=defaults.repetition_penalty if asked is None else asked,
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        logit_bias=_logit_bias(fields.logit_bias or {}, codec.vocab_size),
        bad_words=_bad_words(fields.bad_words or [], codec),
        allowed_token_ids=tuple(
            dict.fromkeys(check_token_ids(fields.allowed_token_ids or [], "allowed_token_ids", codec))
        ),
        min_tokens=fields.min_tokens or 0,
    )
    if rules["min_tokens"] > max_tokens:
        raise InvalidRequest(
            f"min_tokens: must be at most max_tokens, which is {max_tokens}, got {rules['min_tokens']}", "min_tokens"
        )
    _check_some_token_is_left(rules, stop_token_ids)
    return rules


def _logit_bias(biases: dict[str, Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias: at most {MAX_BIASES} entries, got {len(biases)}", "logit_bias")
    checked: dict[int, float] = {}
    for name, bias in biases.items():
        if not re.fullmatch("[0-9]{1,10}", name, re.ASCII) or int(name) >= vocab_size or int(name) in checked:
            raise InvalidRequest(
                f"logit_bias: keys must be different token ids from 0 to {vocab_size - 1}, got {name[:100]!r}",
                "logit_bias",
            )
        # True is a number to Python, and NaN fails every comparison.
        if type(bias) not in (int, float) or not abs(bias) <= MAX_BIAS:
            raise InvalidRequest(
                f"logit_bias: values must be numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}, got {str(bias)[:100]}",
                "logit_bias",
            )
        checked[int(name)] = float(bias)
    return tuple(checked.items())


def _bad_words(words: list[Any], codec: TextCodec) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens as it stands at the beginning of a text and after a space, like vLLM. The same characters
    cut into other tokens are not banned."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str) or not 0 < len(word) <= MAX_BAD_WORD_CHARS:
            raise InvalidRequest(f"bad_words: must be strings of 1 to {MAX_BAD_WORD_CHARS} characters", "bad_words")
        bare = word.lstrip() or word
        for text in (bare, f" {bare}"):
            token_ids = tuple(codec.encode(text, add_special_tokens=False))
            if not token_ids:
                raise InvalidRequest(f"bad_words: {word[:100]!r} has no tokens", "bad_words")
            found[token_ids] = None
    return tuple(found)


def _check_some_token_is_left(rules: TokenRules, stop_token_ids: Sequence[int]) -> None:
    banned = {word[0] for word in rules["bad_words"] if len(word) == 1}
    if rules["min_tokens"]:
        banned.update(stop_token_ids)
    if rules["allowed_token_ids"] and banned.issuperset(rules["allowed_token_ids"]):
        raise InvalidRequest(
            "allowed_token_ids: all of them are ruled out by bad_words, or by min_tokens as stop tokens",
            "allowed_token_ids",
        )
