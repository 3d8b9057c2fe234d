"""The shapes of POST /v1/completions."""

from collections.abc import Sequence
from typing import Any

from router.http.dialect import Choice
from router.http.front_door import FrontDoor
from router.http.logprobs import TokenLogprob, completion_logprobs
from router.http.prompts import prompt_of
from router.http.schema import COMPLETION_NOT_YET, CompletionFields
from router.http.text_codec import TextCodec


class Completions:
    fields = CompletionFields
    not_yet = COMPLETION_NOT_YET
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    prompt_logprobs_in_choices = True

    async def prompt(self, fields: CompletionFields, door: FrontDoor) -> list[int]:
        prompt = prompt_of(fields.prompt, door.codec)
        if isinstance(prompt, str):
            return await door.encode(prompt, fields.add_special_tokens is not False)
        return prompt

    def logprobs(self, tokens: Sequence[TokenLogprob], codec: TextCodec) -> dict[str, Any]:
        return completion_logprobs(tokens, codec)

    def opening(self, index: int) -> Choice | None:
        return None

    def piece(self, index: int, text: str, logprobs: dict[str, Any] | None) -> Choice:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}

    def ending(self, index: int) -> Choice:
        return self.piece(index, "", None)

    def whole(self, index: int, text: str, logprobs: dict[str, Any] | None) -> Choice:
        return self.piece(index, text, logprobs)
