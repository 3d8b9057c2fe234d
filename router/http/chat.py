"""The shapes of POST /v1/chat/completions."""

from typing import Any

from router.http.dialect import Choice
from router.http.front_door import FrontDoor
from router.http.prompts import chat_messages
from router.http.schema import CHAT_NOT_YET, ChatFields


class Chat:
    fields = ChatFields
    not_yet = CHAT_NOT_YET
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    async def prompt(self, fields: ChatFields, door: FrontDoor) -> list[int]:
        messages = chat_messages(fields.messages)
        text = door.codec.render_chat(messages, fields.add_generation_prompt is not False)
        # The template has written the special tokens already.
        return await door.encode(text, fields.add_special_tokens is True)

    def opening(self) -> Choice | None:
        return _delta({"role": "assistant", "content": ""})

    def piece(self, text: str) -> Choice:
        return _delta({"content": text})

    def ending(self) -> Choice:
        return _delta({})

    def whole(self, text: str) -> Choice:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None}


def _delta(delta: dict[str, Any]) -> Choice:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
