"""POST /tokenize and /detokenize: what a prompt costs and what tokens say, without running the model."""

from starlette.requests import Request
from starlette.responses import Response

from cluster.protocol.errors import InvalidRequest
from router.http.body import read_json_object
from router.http.fields import parse_fields
from router.http.front_door import FrontDoor
from router.http.http_errors import json_response
from router.http.ignored import ignored_header
from router.http.prompts import chat_messages, check_token_ids
from router.http.schema import DetokenizeFields, TokenizeFields
from router.http.validate import check_model


async def tokenize(request: Request, door: FrontDoor) -> Response:
    body = await read_json_object(request, door.max_body_bytes, door.body_timeout_s)
    fields, unknown = parse_fields(TokenizeFields, body, {}, door.limits.strict)
    check_model(fields.model, door.limits)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequest("prompt: give either prompt or messages", "prompt")
    if fields.prompt is not None:
        tokens = await door.encode(fields.prompt, fields.add_special_tokens is not False)
    else:
        text = door.codec.render_chat(chat_messages(fields.messages), fields.add_generation_prompt is not False)
        tokens = await door.encode(text, fields.add_special_tokens is True)
    answer = {"count": len(tokens), "max_model_len": door.limits.max_model_len, "tokens": tokens}
    if fields.return_token_strs:
        answer["token_strs"] = door.codec.token_strings(tokens)
    return json_response(answer, headers=ignored_header(unknown))


async def detokenize(request: Request, door: FrontDoor) -> Response:
    body = await read_json_object(request, door.max_body_bytes, door.body_timeout_s)
    fields, unknown = parse_fields(DetokenizeFields, body, {}, door.limits.strict)
    check_model(fields.model, door.limits)
    if fields.tokens is None:
        raise InvalidRequest("tokens: field required", "tokens")
    text = door.codec.decode(check_token_ids(fields.tokens, "tokens", door.codec))
    return json_response({"prompt": text}, headers=ignored_header(unknown))
