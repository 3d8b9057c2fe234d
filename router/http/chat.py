"""The shapes of POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from router.http.dialect import Choice
from router.http.front_door import FrontDoor
from router.http.logprobs import TokenLogprob, chat_logprobs
from router.http.prompts import chat_messages
from router.http.schema import CHAT_NOT_YET, ChatFields
from router.http.text_codec import TextCodec


class Chat:
    fields = ChatFields
    not_yet = CHAT_NOT_YET
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_logprobs_in_choices = False

    async def prompt(self, fields: ChatFields, door: FrontDoor) -> list[int]:
        messages = chat_messages(fields.messages)
        text = door.codec.render_chat(messages, fields.add_generation_prompt is not False)
        # The template has written the special tokens already.
        return await door.encode(text, fields.add_special_tokens is True)

    def logprobs(self, tokens: Sequence[TokenLogprob], codec: TextCodec) -> dict[str, Any]:
        return chat_logprobs(tokens, codec)

    def opening(self, index: int) -> Choice | None:
        return _delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, logprobs: dict[str, Any] | None) -> Choice:
        return _delta(index, {"content": text}) | {"logprobs": logprobs}

    def ending(self, index: int) -> Choice:
        return _delta(index, {})

    def whole(self, index: int, text: str, logprobs: dict[str, Any] | None) -> Choice:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs}


def _delta(index: int, delta: dict[str, Any]) -> Choice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
