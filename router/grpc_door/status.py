"""Every error as a gRPC status with google.rpc details: a client can tell what to change, and when to come again.

Knows nothing of requests but the names of their fields. A stack trace never leaves the process.
"""

import logging
from collections.abc import Awaitable, Sequence
from typing import NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details
from google.rpc import status_pb2

from cluster.protocol.errors import InvalidRequest, NotFound, OutriderError, Overloaded, Unavailable
from router.grpc_door.requests import path_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

DOMAIN = "outrider.v1"  # of ErrorInfo
UNAVAILABLE_RETRY_S = 1.0
# All of a status has to fit into 8 KB of trailers, where a character may take twelve bytes.
_MAX_CHARS = 300


async def answered(context: grpc.aio.ServicerContext, call_id: str, work: Awaitable[T]) -> T:
    """The result of `work`; whatever it raises ends the call with a status. `call_id` finds the trace in the log."""
    try:
        return await work
    except OutriderError as error:
        if not isinstance(error, InvalidRequest | NotFound | Overloaded):
            logger.warning("call %r failed: %s", call_id, error)
        await refuse(context, error)
    except Exception:  # any failure below must become an answer; the trace goes to the log only
        logger.exception("call %r failed", call_id)
        message = f"internal error; the server's log has it under request id {call_id[:128]!r}"
        await context.abort(grpc.StatusCode.INTERNAL, message)
    raise AssertionError("abort raises")


async def refuse(context: grpc.aio.ServicerContext, error: OutriderError) -> NoReturn:
    """End the call with the error's status."""
    code, found = describe(error)
    message = str(error)[:_MAX_CHARS]
    trailers: list[tuple[str, str | bytes]] = []
    if found:
        packed = status_pb2.Status(code=code.value[0], message=message, details=map(_packed, found))
        trailers.append(("grpc-status-details-bin", packed.SerializeToString()))
    for detail in found:
        if isinstance(detail, details.RetryInfo):
            trailers.append(("grpc-retry-pushback-ms", str(detail.retry_delay.ToMilliseconds())))
    await context.abort(code, message, tuple(trailers))
    raise AssertionError("abort raises")


def describe(error: OutriderError) -> tuple[grpc.StatusCode, Sequence[Message]]:
    """The code and the details of an error raised on purpose."""
    match error:
        case InvalidRequest():
            return grpc.StatusCode.INVALID_ARGUMENT, [*_violation(error), *_info(error.code)]
        case NotFound():
            return grpc.StatusCode.NOT_FOUND, [*_violation(error), *_info(error.code)]
        case Overloaded():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, [_retry(error.retry_after_s)]
        case Unavailable():
            return grpc.StatusCode.UNAVAILABLE, [_retry(UNAVAILABLE_RETRY_S)]
    return grpc.StatusCode.INTERNAL, []


def _violation(error: InvalidRequest | NotFound) -> list[Message]:
    if error.field is None:
        return []
    violation = details.BadRequest.FieldViolation(field=path_of(error.field), description=str(error)[:_MAX_CHARS])
    return [details.BadRequest(field_violations=[violation])]


def _info(code: str | None) -> list[Message]:
    return [] if code is None else [details.ErrorInfo(reason=code.upper(), domain=DOMAIN)]


def _retry(after_s: float) -> Message:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(max(1, round(1000 * after_s)))
    return details.RetryInfo(retry_delay=delay)


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
