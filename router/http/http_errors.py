"""Every error as OpenAI-shaped JSON: {"error": {message, type, param, code}} with the right status and headers.

Knows nothing of requests. A stack trace never leaves the process.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from cluster.protocol.errors import InvalidRequest, NotFound, OutriderError, Overloaded, Unavailable

CLIENT_GONE = 499  # nginx's number for a client that left; nobody reads the answer


class BodyRefused(InvalidRequest):
    """The body cannot be read at all: too large, too slow, of the wrong type."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def error_object(
    message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: OutriderError) -> tuple[int, dict[str, str], dict[str, Any]]:
    """(status, extra headers, body) of an error raised on purpose."""
    message = str(error)
    match error:
        case BodyRefused():
            return error.status, {}, error_object(message)
        case InvalidRequest():
            return 400, {}, error_object(message, param=error.field, code=error.code)
        case NotFound():
            return 404, {}, error_object(message, "not_found_error", error.field, error.code)
        case Overloaded():
            retry = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return 503, retry, error_object(message, "service_unavailable_error", code="overloaded")
        case Unavailable():
            return 503, {"Retry-After": "1"}, error_object(message, "service_unavailable_error", code="unavailable")
    return 500, {}, error_object(message, "internal_server_error")


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_response(error: OutriderError) -> Response:
    status, headers, body = describe(error)
    return json_response(body, status, headers)
