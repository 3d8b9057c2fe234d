"""A GenerateRequest as the fields of an HTTP request, so that both doors check and mean the same.

Pure. The invariant: a field that the client set is among the fields, under HTTP's name.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from cluster.protocol import outrider_v1_pb2 as v1
from cluster.protocol.errors import InvalidRequest
from router.http.chat import Chat
from router.http.completions import Completions
from router.http.intake import Form

_SAMPLING = frozenset(v1.SamplingParams.DESCRIPTOR.fields_by_name)
_CHAT = frozenset(v1.ChatInput.DESCRIPTOR.fields_by_name)


def form_of(request: v1.GenerateRequest) -> Form[Any]:
    return Chat() if request.WhichOneof("prompt") == "chat" else Completions()


def body_of(request: v1.GenerateRequest) -> dict[str, Any]:
    """The body of the HTTP request that asks for the same."""
    body = _given(request.sampling_params)
    if request.HasField("speculation"):
        body["speculation"] = _given(request.speculation)
    if request.HasField("model"):
        body["model"] = request.model
    match request.WhichOneof("prompt"):
        case "tokenized":
            return body | {"prompt": list(request.tokenized.input_ids)}
        case "text":
            return body | {"prompt": request.text}
        case "chat":
            chat = _given(request.chat) | {"messages": [_given(message) for message in request.chat.messages]}
            return _with_chat_logprobs(body) | chat
    return body


def path_of(field: str) -> str:
    """Where a field of the HTTP request stands in a GenerateRequest."""
    root = field.partition(".")[0]
    if field == "top_logprobs":
        return "sampling_params.logprobs"
    if root in _SAMPLING:
        return f"sampling_params.{field}"
    return f"chat.{field}" if root in _CHAT else field


def refuse_unknown(request: v1.GenerateRequest) -> None:
    """Raises InvalidRequest when the client knows fields that this version does not."""
    known = v1.GenerateRequest()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    if known.ByteSize() != request.ByteSize():
        raise InvalidRequest("the request has fields that this version does not know, and this server is strict")


def _given(message: Message) -> dict[str, Any]:
    """The fields that are set, as JSON has them."""
    return {descriptor.name: _plain(value) for descriptor, value in message.ListFields()}


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): entry for key, entry in value.items()}
    return list(value)


def _with_chat_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    """Chats say in two fields what completions say in one."""
    if "logprobs" not in body:
        return body
    return body | {"logprobs": True, "top_logprobs": body["logprobs"]}
