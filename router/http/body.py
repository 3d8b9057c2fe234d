"""Reads one JSON object from a request, whatever was sent. Knows nothing of its fields.

The invariant: anything that is not a JSON object of bounded size, depth and duration ends as an InvalidRequest; every
string that comes out is valid Unicode.
"""

import asyncio
import json
from typing import Any

from starlette.requests import Request

from cluster.protocol.errors import InvalidRequest
from router.http.http_errors import BodyRefused

MAX_DEPTH = 64  # nested arrays and objects


async def read_json_object(request: Request, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """Raises BodyRefused (408, 413, 415) or InvalidRequest (400)."""
    _check_headers(request, max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, max_bytes)
    except TimeoutError as error:
        raise BodyRefused(408, f"the request body did not arrive within {timeout_s:g} s") from error
    return parse_json_object(raw)


def parse_json_object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the request body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise InvalidRequest(f"the request body nests deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise InvalidRequest(f"the request body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the request body must be a JSON object, got {type(value).__name__}")
    _check_values(value)
    return value


def _check_headers(request: Request, max_bytes: int) -> None:
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise BodyRefused(415, f"the request body must be application/json, got {media_type[:100]!r}")
    if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise BodyRefused(415, f"compressed request bodies are not accepted, got content-encoding {encoding[:100]!r}")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)


async def _read(request: Request, max_bytes: int) -> bytes:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(raw)


def _too_large(max_bytes: int) -> BodyRefused:
    return BodyRefused(413, f"the request body is larger than {max_bytes} bytes")


def _check_values(value: dict[str, Any]) -> None:
    """Bounds the depth and refuses lone surrogates, which JSON can escape but no tokenizer takes."""
    level: list[tuple[str, Any]] = list(value.items())
    _check_strings("", value)
    for _ in range(MAX_DEPTH):
        deeper: list[tuple[str, Any]] = []
        for path, item in level:
            if isinstance(item, str):
                _check_unicode(path, item)
            elif isinstance(item, dict):
                _check_strings(path, item)
                deeper += [(path, entry) for entry in item.values()]
            elif isinstance(item, list):
                deeper += [(path, entry) for entry in item if not isinstance(entry, int | float)]
        if not deeper:
            return
        level = deeper
    raise InvalidRequest(f"{level[0][0]}: nests deeper than {MAX_DEPTH} levels", level[0][0])


def _check_strings(path: str, names: dict[str, Any]) -> None:
    for name in names:
        _check_unicode(path, name)


def _check_unicode(path: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{path or 'a field name'}: lone surrogate at character {error.start}", path or None
        ) from error
