"""The request fields that work, with their types and limits, and the known fields that do not work yet.

A missing field is None (JSON null means missing). Limits that depend on the model are checked in validate.py.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_DEPTH = 64  # draft tokens in one block
MAX_CHOICES = 8
MAX_LOGPROBS = 20  # best tokens reported at each place
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_ALLOWED_TOKEN_IDS = 2000

Role = Literal["system", "developer", "user", "assistant"]


class Fields(BaseModel):
    # Strict: "10" is no number and 1.5 no count. Unknown fields are kept aside for the caller to refuse or to name.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SpeculationFields(Fields):
    """Ours: what the request says of speculation. `report` adds `metrics.speculative_decoding` to the answer."""

    enabled: bool | None = None
    max_depth: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | None = None
    drafter: str | None = None
    acceptance: Literal["auto", "coupled", "ratio"] | None = None
    report: bool | None = None


class GenerationFields(Fields):
    """Common to both endpoints."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # -1 and 0 are off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None  # smaller ones would overflow a logit
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Any] | None = None  # token id as text -> what is added to its logit
    bad_words: Annotated[list[Any], Field(max_length=MAX_BAD_WORDS)] | None = None  # strings
    allowed_token_ids: Annotated[list[Any], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None  # no stop of any kind before
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None  # best tokens beside the prompt's own
    stop: Any = None  # a string, or up to MAX_STOPS of them
    stop_token_ids: Annotated[list[Any], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationFields | None = None
    user: str | None = None


class CompletionFields(GenerationFields):
    prompt: Any = None  # a string, a list of token ids, or a list with exactly one of these
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None  # how many best tokens beside the chosen one
    echo: bool | None = None  # the prompt before the answer
    max_tokens: Annotated[int, Field(ge=0)] | None = None  # 0 only with echo: the prompt alone


class Message(Fields):
    role: Role
    content: Any = None  # a string, or a list of text parts
    name: str | None = None


class ChatFields(GenerationFields):
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TokenizeFields(Fields):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Fields):
    model: str | None = None
    tokens: list[Any] | None = None  # token ids


# Known fields that do not work yet, each with the values that ask for nothing. Anything else is refused by name,
# because an answer that silently lacks what was asked for is worse than none. Missing and null always ask for nothing.
NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    "prediction": (),
    "priority": (0,),
    "request_id": (),
    "session_id": (),
    "cache_salt": (),
    "service_tier": ("auto", "default"),
}
COMPLETION_NOT_YET: Mapping[str, tuple[Any, ...]] = {
    **NOT_YET,
    "suffix": ("",),
}
CHAT_NOT_YET: Mapping[str, tuple[Any, ...]] = {
    **NOT_YET,
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
}
MESSAGE_NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "audio": (),
}
