"""What is asked of an OpenAI-compatible server and what it answered, in either dialect, streamed or whole.

Knows nothing of the network. The invariant: whatever the shape of the response, an `Answer` holds the same facts, and
a fact that the server did not give is None, never a default.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from cluster.check.errors import RequestFailed

Json: TypeAlias = dict[str, Any]
Messages: TypeAlias = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `extra` are fields beyond those that every server knows, such as seed or stop."""

    prompt: str | Messages  # text to continue, or a chat
    max_tokens: int
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    logprobs: bool = False  # of the chosen tokens, with the two best alternatives

    def having(self, **extra: Any) -> "Ask":
        """The same with more fields."""
        return replace(self, extra={**self.extra, **extra})

    def body(self, model: str, chat: bool) -> Json:
        """The request as JSON, for the chat or for the completions endpoint."""
        body: Json = {"model": model, "max_tokens": self.max_tokens, "temperature": self.temperature, **self.extra}
        if chat:
            messages = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
            body["messages"] = [dict(message) for message in messages]
        else:
            body["prompt"] = self.prompt
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: str
    logprob: float
    top: Mapping[str, float]  # token -> log-probability, the best ones


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    accepted: int | None = None  # draft tokens that became part of the answer; None = not reported
    rejected: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    finish_reason: str | None
    usage: Usage | None
    logprobs: tuple[TokenLogprob, ...] | None
    pieces: int  # parts with text in which the answer came; 1 when it came whole
    ignored: tuple[str, ...] = ()  # fields that the server says it did not know

    @property
    def tokens(self) -> int | None:
        """Completion tokens as the server counts them."""
        return self.usage.completion_tokens if self.usage else None


def read_answer(parts: Iterable[Json], ignored: Sequence[str] = ()) -> Answer:
    """The answer in a whole response (one part) or in the events of a stream. Raises RequestFailed."""
    text: list[str] = []
    logprobs: list[TokenLogprob] | None = None
    finish_reason, usage = None, None
    try:
        for part in parts:
            usage = _usage(part["usage"]) if part.get("usage") else usage
            for choice in part["choices"][:1]:
                text.append(_text(choice))
                finish_reason = choice.get("finish_reason") or finish_reason
                if choice.get("logprobs"):
                    logprobs = (logprobs or []) + _logprobs(choice["logprobs"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestFailed(f"the answer is not shaped as OpenAI's: {type(error).__name__} {error}") from error
    known = None if logprobs is None else tuple(logprobs)
    return Answer("".join(text), finish_reason, usage, known, sum(map(bool, text)), tuple(ignored))


def _text(choice: Json) -> str:
    if "text" in choice:
        return str(choice["text"] or "")
    message = choice.get("message") or choice.get("delta") or {}
    # Servers that split off a model's reasoning name it in one of these ways; it is generated text like the rest.
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return str(reasoning) + str(message.get("content") or "")


def _logprobs(given: Json) -> list[TokenLogprob]:
    if "content" in given:  # chat
        return [
            TokenLogprob(
                str(entry["token"]),
                float(entry["logprob"]),
                {str(top["token"]): float(top["logprob"]) for top in entry.get("top_logprobs") or []},
            )
            for entry in given["content"] or []
        ]
    tops = given.get("top_logprobs") or [{}] * len(given["tokens"])
    return [
        TokenLogprob(str(token), float(logprob), {str(t): float(value) for t, value in (top or {}).items()})
        for token, logprob, top in zip(given["tokens"], given["token_logprobs"], tops, strict=True)
        if logprob is not None  # the first token of an echoed prompt follows nothing
    ]


def _usage(given: Json) -> Usage:
    details = given.get("completion_tokens_details") or {}
    accepted, rejected = details.get("accepted_prediction_tokens"), details.get("rejected_prediction_tokens")
    return Usage(
        int(given["prompt_tokens"]),
        int(given["completion_tokens"]),
        int(given["total_tokens"]),
        None if accepted is None else int(accepted),
        None if rejected is None else int(rejected),
    )
