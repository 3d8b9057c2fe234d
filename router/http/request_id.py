"""Gives every HTTP request an id that its answer carries, and answers what nothing else could.

The outermost layer: it knows only ASGI messages. The invariant: a request never ends without a status.
"""

import logging
import re
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.http_errors import error_object, json_response

logger = logging.getLogger(__name__)

_TAME = re.compile(r"[\x21-\x7e]{1,128}")


def is_tame(request_id: str) -> bool:
    """1 to 128 printable ASCII characters, which neither a log nor a header minds."""
    return _TAME.fullmatch(request_id) is not None


class RequestIdMiddleware:
    """Honours the client's x-request-id when it is tame."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if is_tame(asked) else uuid4().hex
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:  # any failure below must become an answer; the trace goes to the log only
            logger.exception("request %s failed", request_id)
            if started:
                raise  # too late for a status: the server closes the connection
            message = f"internal error; the server's log has it under request id {request_id}"
            response = json_response(error_object(message, "internal_server_error"), 500)
            await response(scope, receive, send_with_id)
