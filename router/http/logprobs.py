"""Log-probabilities of an answer's tokens, in the shapes of the two dialects. Knows nothing of where they come from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.protocol.messages import Committed
from router.http.text_codec import TextCodec

LEAST = -9999.0  # OpenAI's and vLLM's floor: JSON has no infinity


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of the answer, and the best tokens at its place, best first."""

    token_id: int
    logprob: float
    best: tuple[tuple[int, float], ...]
    offset: int = 0  # characters of the answer before this token's text


def logprobs_of(burst: Committed) -> Iterator[TokenLogprob]:
    """One for each token of a burst that brings log-probabilities."""
    if burst.logprobs is None:
        return
    chosen, ids, values = (
        part.tolist() for part in (burst.logprobs.chosen, burst.logprobs.top_ids, burst.logprobs.top)
    )
    best = len(ids) // max(1, len(chosen))
    for i, (token_id, logprob) in enumerate(zip(burst.token_ids.tolist(), chosen, strict=True)):
        places = slice(i * best, (i + 1) * best)
        yield TokenLogprob(token_id, logprob, tuple(zip(ids[places], values[places], strict=True)))


def chat_logprobs(tokens: Sequence[TokenLogprob], codec: TextCodec) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = codec.token_bytes(token_id)
        return {"token": _readable(raw), "logprob": max(logprob, LEAST), "bytes": list(raw)}

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
        "token_logprobs": [max(token.logprob, LEAST) for token in tokens],
        "top_logprobs": [
            {name(token_id): max(value, LEAST) for token_id, value in (*token.best, (token.token_id, token.logprob))}
            for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


def _readable(raw: bytes) -> str:
    """The token's text, or OpenAI's notation of a part of a character, which keeps different tokens apart."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
