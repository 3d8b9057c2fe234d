"""Log-probabilities of the tokens of an answer and of its prompt, in the shapes of the two dialects.

Knows nothing of where they come from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.protocol.errors import ProtocolError
from cluster.protocol.messages import Committed, TokenLogprobs, Tokens
from router.http.text_codec import TextCodec

LEAST = -9999.0  # OpenAI's and vLLM's floor: JSON has no infinity


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of the answer or of its prompt, and the best tokens at its place, best first."""

    token_id: int
    logprob: float | None  # None of a prompt's first token, which follows nothing
    best: tuple[tuple[int, float], ...]
    offset: int = 0  # characters of the whole text before this token's


def logprobs_of(burst: Committed) -> Iterator[TokenLogprob]:
    """One for each token of a burst that brings log-probabilities."""
    if burst.logprobs is not None:
        yield from _named(burst.token_ids, burst.logprobs)


def prompt_logprobs_of(burst: Committed, prompt: Tokens) -> list[TokenLogprob]:
    """One for each token of the prompt of a burst that brings them. Raises ProtocolError when they do not fit."""
    given = burst.prompt_logprobs
    if given is None and len(prompt) > 1:
        raise ProtocolError("the first burst came without the prompt's log-probabilities")
    if given is not None and len(given.chosen) != len(prompt) - 1:
        raise ProtocolError(f"{len(given.chosen)} log-probabilities came for a prompt of {len(prompt)} tokens")
    first = TokenLogprob(int(prompt[0]), None, ())
    return [first] if given is None else [first, *_named(prompt[1:], given)]


def _named(token_ids: Tokens, given: TokenLogprobs) -> Iterator[TokenLogprob]:
    chosen, ids, values = (part.tolist() for part in (given.chosen, given.top_ids, given.top))
    best = len(ids) // max(1, len(chosen))
    for i, (token_id, logprob) in enumerate(zip(token_ids.tolist(), chosen, strict=True)):
        places = slice(i * best, (i + 1) * best)
        yield TokenLogprob(token_id, logprob, tuple(zip(ids[places], values[places], strict=True)))


def chat_logprobs(tokens: Sequence[TokenLogprob], codec: TextCodec) -> dict[str, Any]:
    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = codec.token_bytes(token_id)
        return {"token": _readable(raw), "logprob": _number(logprob), "bytes": list(raw)}

    content = [
        entry(token.token_id, token.logprob) | {"top_logprobs": [entry(*pair) for pair in token.best]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob], codec: TextCodec) -> dict[str, Any]:
    """`top_logprobs` always names the chosen token too, so that it may have one entry more than was asked for."""

    def name(token_id: int) -> str:
        return _readable(codec.token_bytes(token_id))

    return {
        "tokens": [name(token.token_id) for token in tokens],
        "token_logprobs": [_number(token.logprob) for token in tokens],
        "top_logprobs": [
            {name(token_id): _number(value) for token_id, value in (*token.best, (token.token_id, token.logprob))}
            if token.logprob is not None
            else None
            for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


def prompt_logprobs(tokens: Sequence[TokenLogprob], best: int, codec: TextCodec) -> list[dict[str, Any] | None]:
    """vLLM's field of that name: for each token of the prompt an object from ids to values, the token's own first.
    Its rank is null where it is not among the best that were asked for."""
    return [None if token.logprob is None else _ranked(token, best, codec) for token in tokens]


def _ranked(token: TokenLogprob, best: int, codec: TextCodec) -> dict[str, Any]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.best, 1)}
    return {
        str(token_id): {
            "logprob": _number(value),
            "rank": ranks.get(token_id),
            "decoded_token": _readable(codec.token_bytes(token_id)),
        }
        for token_id, value in ((token.token_id, token.logprob), *token.best[:best])
    }


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)


def _readable(raw: bytes) -> str:
    """The token's text, or OpenAI's notation of a part of a character, which keeps different tokens apart."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
