"""Takes a JSON object apart into fields with the right types, and says which names nobody knows.

Pure. The invariant: a field is used, refused by name, or reported as unknown; none disappears.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from cluster.protocol.errors import InvalidRequest
from router.http.schema import MESSAGE_NOT_YET, Fields, Message

F = TypeVar("F", bound=Fields)


def parse_fields(
    kind: type[F], body: Mapping[str, Any], not_yet: Mapping[str, Sequence[Any]], strict: bool
) -> tuple[F, tuple[str, ...]]:
    """The fields of `body`, and the names of those nobody knows. Raises InvalidRequest."""
    given = _without_nulls(body)
    for name in not_yet.keys() & given.keys():
        refuse_unless_neutral(name, given.pop(name), not_yet[name])
    try:
        fields = kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{path}: {first['msg']}", path) from error
    unknown = tuple(dict.fromkeys(_unknown(fields)))
    if unknown and strict:
        raise InvalidRequest(f"{unknown[0][:100]}: unknown field, and this server is strict", unknown[0][:100])
    return fields, unknown


def _without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def refuse_unless_neutral(name: str, value: Any, neutral: Sequence[Any], path: str | None = None) -> None:
    # True == 1 in Python, but `n: true` is nobody's way to say 1.
    if any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
        return
    allowed = f"; only {' or '.join(map(repr, neutral))} is accepted" if neutral else ""
    raise InvalidRequest(f"{path or name}: not supported yet{allowed}", path or name)


def _unknown(fields: Fields, path: str = "") -> Iterator[str]:
    """Names of fields that the schema does not have, with their paths; list indices are left out."""
    for name, value in (fields.model_extra or {}).items():
        if value is not None and not (isinstance(fields, Message) and name in MESSAGE_NOT_YET):
            yield path + name
    for name in type(fields).model_fields:
        value = getattr(fields, name)
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, Fields):
                yield from _unknown(entry, f"{path}{name}.")
