"""The shapes of POST /v1/completions."""

from router.http.dialect import Choice
from router.http.front_door import FrontDoor
from router.http.prompts import prompt_of
from router.http.schema import COMPLETION_NOT_YET, CompletionFields


class Completions:
    fields = CompletionFields
    not_yet = COMPLETION_NOT_YET
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    async def prompt(self, fields: CompletionFields, door: FrontDoor) -> list[int]:
        prompt = prompt_of(fields.prompt, door.codec)
        if isinstance(prompt, str):
            return await door.encode(prompt, fields.add_special_tokens is not False)
        return prompt

    def opening(self) -> Choice | None:
        return None

    def piece(self, text: str) -> Choice:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def ending(self) -> Choice:
        return self.piece("")

    def whole(self, text: str) -> Choice:
        return self.piece(text)
