"""From fields to a request that can run, or an InvalidRequest that names the field and its limit.

Pure: knows the model's codec and limits, nothing of the network. Nothing is sent anywhere before this has passed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.protocol.errors import InvalidRequest, NotFound
from cluster.protocol.messages import Rule, SamplingParams, Speculation, Tokens, as_tokens
from router.http.prompts import check_token_ids
from router.http.schema import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    ChatFields,
    CompletionFields,
    GenerationFields,
    SpeculationFields,
)
from router.http.text_codec import TextCodec
from router.http.token_rules import token_rules

# Below this a temperature is greedy: logits divided by less exceed what float32 can tell apart.
MIN_TEMPERATURE = 1e-3


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against, besides the codec."""

    model: str  # the served name
    max_model_len: int  # prompt and output together, tokens
    drafters: tuple[str, ...] = ()  # names that `speculation.drafter` may use
    strict: bool = False  # refuse unknown fields


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can run."""

    prompt: Tokens  # [>= 1]
    sampling: SamplingParams  # of choice 0; the others differ in `choice` alone
    choices: int
    speculation: Speculation
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    report: bool
    echo: str | None = None  # the prompt's text, where the answer begins with it
    only_prompt: bool = False  # nothing that is generated counts
    prompt_logprobs: int | None = None  # of so many best tokens in the field of that name; echo has its own


def check_model(asked: str | None, limits: Limits) -> None:
    if asked is not None and asked != limits.model:
        raise NotFound(
            f"model {asked[:200]!r} does not exist; this server serves {limits.model!r}", "model", "model_not_found"
        )


def prepare(
    fields: GenerationFields, prompt: Sequence[int], codec: TextCodec, limits: Limits, key: int
) -> PreparedRequest:
    """Raises InvalidRequest. `key` is the random key of a request without a seed."""
    cut = fields.truncate_prompt_tokens
    if cut is not None and cut > limits.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens: must be at most {limits.max_model_len}, got {cut}", "truncate_prompt_tokens"
        )
    kept = prompt if cut is None else prompt[-cut:]
    options = fields.stream_options
    speculation = fields.speculation or SpeculationFields()
    return PreparedRequest(
        prompt=as_tokens(kept),
        sampling=_sampling(fields, _max_tokens(fields, len(kept), limits), codec, key),
        choices=fields.n or 1,
        speculation=_speculation(speculation, limits),
        stops=_stops(fields.stop),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        stream=_stream(fields),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        report=bool(speculation.report),
        echo=_echo(fields, kept, codec),
        only_prompt=fields.max_tokens == 0,
        prompt_logprobs=fields.prompt_logprobs,
    )


def _max_tokens(fields: GenerationFields, prompt_len: int, limits: Limits) -> int:
    limits_asked = {fields.max_tokens, fields.max_completion_tokens} - {None}
    if len(limits_asked) > 1:
        raise InvalidRequest(
            f"max_completion_tokens: {fields.max_completion_tokens} contradicts max_tokens {fields.max_tokens}",
            "max_completion_tokens",
        )
    if fields.max_tokens == 0 and not (isinstance(fields, CompletionFields) and fields.echo):
        raise InvalidRequest("max_tokens: must be at least 1 without echo", "max_tokens")
    if prompt_len == 0:
        raise InvalidRequest("prompt: must hold at least one token", "prompt")
    # An answer that is the prompt alone takes a token all the same: the target's values come with it.
    asked = fields.max_completion_tokens or (1 if fields.max_tokens == 0 else fields.max_tokens)
    room = limits.max_model_len - prompt_len
    if room < (asked or 1):
        wanted = f"{asked} more were asked for" if asked else "that leaves no room for an answer"
        raise InvalidRequest(
            f"This model's maximum context length is {limits.max_model_len} tokens, "
            f"but the prompt has {prompt_len} tokens and {wanted}.",
            field="messages" if isinstance(fields, ChatFields) else "prompt",
            code="context_length_exceeded",
        )
    return asked or room


def _sampling(fields: GenerationFields, max_tokens: int, codec: TextCodec, key: int) -> SamplingParams:
    defaults = codec.defaults
    temperature = defaults.temperature if fields.temperature is None else fields.temperature
    top_k = defaults.top_k if fields.top_k is None else max(0, fields.top_k)
    asked_stops = check_token_ids(fields.stop_token_ids or [], "stop_token_ids", codec)
    eos = () if fields.ignore_eos else codec.eos_ids
    stop_token_ids = tuple(dict.fromkeys((*eos, *asked_stops)))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
        top_k=top_k if top_k < codec.vocab_size else 0,
        top_p=defaults.top_p if fields.top_p is None else fields.top_p,
        stop_token_ids=stop_token_ids,
        rule=_rule(fields, temperature),
        key=key if fields.seed is None else fields.seed % 2**64,
        logprobs=_logprobs(fields),
        prompt_logprobs=_prompt_logprobs(fields),
        **token_rules(fields, max_tokens, stop_token_ids, codec),
    )


def _logprobs(fields: GenerationFields) -> int | None:
    """How many best tokens to report beside each chosen one; None = no log-probabilities at all."""
    if isinstance(fields, CompletionFields):
        return fields.logprobs
    if not isinstance(fields, ChatFields) or not fields.logprobs:
        if isinstance(fields, ChatFields) and fields.top_logprobs:
            raise InvalidRequest("top_logprobs: only allowed with logprobs: true", "top_logprobs")
        return None
    return fields.top_logprobs or 0


def _prompt_logprobs(fields: GenerationFields) -> int | None:
    """How many best tokens the target must report beside each token of the prompt; None = nothing."""
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidRequest("prompt_logprobs: not available with stream: true", "prompt_logprobs")
    echoed = fields.logprobs if isinstance(fields, CompletionFields) and fields.echo else None
    asked = [best for best in (fields.prompt_logprobs, echoed) if best is not None]
    return max(asked) if asked else None


def _echo(fields: GenerationFields, kept: Sequence[int], codec: TextCodec) -> str | None:
    """A text comes back as it was sent; token ids, and what a cut has left, as the text that they stand for."""
    if not isinstance(fields, CompletionFields) or not fields.echo:
        return None
    prompt = fields.prompt[0] if isinstance(fields.prompt, list) else fields.prompt
    if isinstance(prompt, str) and fields.truncate_prompt_tokens is None:
        return prompt
    return codec.decode(kept)


def _rule(fields: GenerationFields, temperature: float) -> Rule:
    """auto: text that must come again (a seed, or no sampling at all) does not depend on the drafts; other sampling
    uses the rule that accepts more of them."""
    asked = fields.speculation.acceptance if fields.speculation else None
    if asked == "coupled" or asked == "ratio":
        return asked
    return "coupled" if fields.seed is not None or temperature < MIN_TEMPERATURE else "ratio"


def _speculation(fields: SpeculationFields, limits: Limits) -> Speculation:
    if fields.drafter and fields.drafter not in limits.drafters:
        raise InvalidRequest(
            f"speculation.drafter: {fields.drafter[:100]!r} is none of {', '.join(limits.drafters) or '(none)'}",
            "speculation.drafter",
        )
    return Speculation(fields.enabled is not False, fields.max_depth, fields.drafter or "")


def _stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in stops):
        raise InvalidRequest(f"stop: must be strings of 1 to {MAX_STOP_CHARS} characters", "stop")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop: at most {MAX_STOPS} strings, got {len(stops)}", "stop")
    return tuple(stops)


def _stream(fields: GenerationFields) -> bool:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options: only allowed with stream: true", "stream_options")
    return bool(fields.stream)
