"""The prompt of a request, in the forms that clients send it. Knows nothing of sampling."""

from collections.abc import Sequence
from typing import Any

from cluster.protocol.errors import InvalidRequest
from router.http.fields import refuse_unless_neutral
from router.http.schema import MESSAGE_NOT_YET, Message
from router.http.text_codec import TextCodec


def prompt_of(prompt: Any, codec: TextCodec) -> str | list[int]:
    """A completion's prompt: text, or token ids in the vocabulary. A list with one prompt is that prompt."""
    if prompt is None:
        raise InvalidRequest("prompt: field required", "prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InvalidRequest(f"prompt: one prompt a request, got {len(prompt)}", "prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt: must be a string or a list of token ids", "prompt")
    return check_token_ids(prompt, "prompt", codec)


def check_token_ids(ids: Sequence[Any], name: str, codec: TextCodec) -> list[int]:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < codec.vocab_size:
            raise InvalidRequest(
                f"{name}: token ids must be integers from 0 to {codec.vocab_size - 1}, got {str(token_id)[:100]}", name
            )
    return list(ids)


def chat_messages(messages: Sequence[Message] | None) -> list[dict[str, Any]]:
    """The messages as a chat template takes them."""
    if messages is None:
        raise InvalidRequest("messages: field required", "messages")
    return [_message(message, f"messages.{i}") for i, message in enumerate(messages)]


def _message(message: Message, path: str) -> dict[str, Any]:
    for name in MESSAGE_NOT_YET.keys() & (message.model_extra or {}).keys():
        value = (message.model_extra or {})[name]
        if value is not None:
            refuse_unless_neutral(name, value, MESSAGE_NOT_YET[name], f"{path}.{name}")
    # Models know the system role; "developer" is OpenAI's newer name for it.
    role = "system" if message.role == "developer" else message.role
    rendered = {"role": role, "content": _content(message.content, f"{path}.content")}
    return rendered if message.name is None else rendered | {"name": message.name}


def _content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{path}: must be a string or a list of text parts", path)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(f'{path}: only parts {{"type": "text", "text": string}} are supported', path)
    return "\n".join(part["text"] for part in content)
