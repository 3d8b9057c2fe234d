"""From a request's fields to answers in the making: the steps that every front door takes, in their order.

Knows nothing of how fields arrive or of what becomes of the answers. Nothing is sent anywhere before all has passed.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from router.http.answer import Answer, Piece
from router.http.choices import interleave
from router.http.fields import parse_fields
from router.http.front_door import FrontDoor
from router.http.schema import GenerationFields
from router.http.validate import PreparedRequest, check_model, prepare

F = TypeVar("F", bound=GenerationFields)


class Form(Protocol[F]):
    """What kind of prompt a request has, and which fields go with it."""

    fields: type[F]
    not_yet: Mapping[str, tuple[Any, ...]]

    async def prompt(self, fields: F, door: FrontDoor) -> list[int]: ...


async def take_in(body: Mapping[str, Any], form: Form[F], door: FrontDoor) -> tuple[PreparedRequest, tuple[str, ...]]:
    """The request that can run, and the names of fields that nobody knows. Raises OutriderError."""
    fields, unknown = parse_fields(form.fields, body, form.not_yet, door.limits.strict)
    check_model(fields.model, door.limits)
    prompt = await form.prompt(fields, door)
    prepared = prepare(fields, prompt, door.codec, door.limits, door.new_key())
    door.load.check(prepared.choices)
    return prepared, unknown


async def side_by_side(answers: Sequence[Answer], door: FrontDoor) -> AsyncGenerator[tuple[int, Piece | None], None]:
    """(choice, piece) of all answers as they come, (choice, None) when that one has ended."""
    with door.load.entered(len(answers)):
        async with aclosing(interleave([answer.pieces() for answer in answers])) as numbered:
            async for index, piece in numbered:
                yield index, piece
