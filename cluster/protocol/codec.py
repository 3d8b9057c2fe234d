"""A batch of messages as one frame of bytes, and back. Knows nothing of links, sessions or what the numbers mean.

    header   magic "OUTR", version u16, reserved u16, head bytes u32, array bytes u32        (little-endian)
    head     msgpack [[tag, array bytes, body], ...], zero-padded to 8; body = msgpack of the field values in order
    arrays   every array of every message, little-endian in order, each filled up to 4 bytes; the body holds their
             lengths

The field types of messages.py are the schema: their order is the wire order, checked strictly on the way in. A damaged
frame raises; a damaged message inside a sound frame comes out as `Malformed` and harms only its session.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from cluster.protocol import messages as m
from cluster.protocol.errors import ProtocolError
from cluster.protocol.messages import PROTOCOL_VERSION, Epoch, Message
from cluster.protocol.schema import MAX_NAME, ArrayReader, Record

MAX_FRAME_BYTES = 64 * 2**20  # on both ends of every carrier; 16 million token ids

_MAGIC = b"OUTR"
_HEADER = struct.Struct("<4sHHII")
_ALIGNMENT = 8
_MAX_REASON = 500  # characters; the reason may quote what came

# Part of the wire format: a tag is never reused for another kind.
_TAGS: dict[int, type[Message]] = {
    1: m.Generate,
    2: m.Committed,
    3: m.DraftRequest,
    4: m.DraftBlock,
    5: m.OpenSession,
    6: m.VerifyRequest,
    7: m.VerifyResult,
    8: m.Close,
    9: m.Stale,
    10: m.Refused,
    11: m.LoadReport,
    12: m.FeatureRequest,
    13: m.FeatureRows,
}


@dataclass(frozen=True, slots=True)
class Malformed:
    """What came in place of a usable message. session_id is "" where there is none or even that is unreadable."""

    kind: type[Message] | None  # None = unknown tag
    session_id: str
    epoch: Epoch
    reason: str


def encode(messages: Sequence[Message]) -> bytes:
    """One frame. Raises TypeError for an array of the wrong dtype or shape, ProtocolError above MAX_FRAME_BYTES."""
    entries: list[tuple[int, int, bytes]] = []
    arrays: list[NDArray[Any]] = []
    for message in messages:
        schema = _SCHEMA_OF_KIND[type(message)]
        before = len(arrays)
        body = _ENCODER.encode(schema.record.pack(message, arrays))
        entries.append((schema.tag, _nbytes(arrays[before:]), body))
    return _join(entries, arrays)


def encode_malformed(message: Message) -> bytes:
    """A sound frame with `message` in it as a malformed one: its last fields are missing. For fault injection."""
    schema = _SCHEMA_OF_KIND[type(message)]
    body = msgspec.msgpack.decode(_ENCODER.encode(schema.record.pack(message, [])))
    return _join([(schema.tag, 0, _ENCODER.encode(body[:2]))], [])


def _join(entries: Sequence[tuple[int, int, bytes]], arrays: Sequence[NDArray[Any]]) -> bytes:
    head = _ENCODER.encode(entries)
    padding = bytes(-len(head) % _ALIGNMENT)
    array_bytes = _nbytes(arrays)
    size = _HEADER.size + len(head) + len(padding) + array_bytes
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a batch of {len(entries)} messages takes {size} bytes, the limit is {MAX_FRAME_BYTES}")
    header = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, 0, len(head), array_bytes)
    return b"".join((header, head, padding, *(array.data for array in arrays)))


def _nbytes(arrays: Sequence[NDArray[Any]]) -> int:
    return sum([array.nbytes for array in arrays])


def decode(frame: bytes) -> list[Message | Malformed]:
    """The batch. Its arrays are read-only views that keep the frame alive. Raises ProtocolError for a damaged frame."""
    head, at = _split(frame)
    try:
        entries = _HEAD_DECODER.decode(head)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"unreadable frame head: {error}") from error
    claimed = sum(array_bytes for _, array_bytes, _ in entries)
    if claimed != len(frame) - at:
        raise ProtocolError(f"messages claim {claimed} bytes of arrays, the frame has {len(frame) - at}")
    reader = ArrayReader(frame, at)
    return [_decode_message(tag, body, array_bytes, reader) for tag, array_bytes, body in entries]


def _split(frame: bytes) -> tuple[memoryview, int]:
    """The frame's head, and where its arrays start."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes, the limit is {MAX_FRAME_BYTES}")
    if len(frame) < _HEADER.size:
        raise ProtocolError(f"frame of {len(frame)} bytes, a header takes {_HEADER.size}")
    magic, version, reserved, head_bytes, array_bytes = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise ProtocolError(f"not a frame: expected magic {_MAGIC!r}, got {magic!r}")
    if version != PROTOCOL_VERSION or reserved:
        raise ProtocolError(f"expected protocol version {PROTOCOL_VERSION}, got {version} (reserved {reserved})")
    head_end = _HEADER.size + head_bytes
    arrays_at = head_end + -head_bytes % _ALIGNMENT
    if arrays_at + array_bytes != len(frame):
        raise ProtocolError(f"header announces {arrays_at + array_bytes} bytes, the frame has {len(frame)}")
    if any(frame[head_end:arrays_at]):
        raise ProtocolError("padding after the frame head is not zero")
    return memoryview(frame)[_HEADER.size : head_end], arrays_at


def _decode_message(tag: int, body: bytes, array_bytes: int, reader: ArrayReader) -> Message | Malformed:
    reader.begin(array_bytes)
    schema = _SCHEMA_OF_TAG.get(tag)
    try:
        if schema is None:
            raise ProtocolError(f"expected a message tag in 1..{max(_TAGS)}, got {tag}")
        message: Message = schema.record.unpack(schema.decoder.decode(body), reader)
        reader.expect_end()
        if (check := _CHECKS.get(schema.kind)) is not None:
            check(message)
        return message
    except (msgspec.MsgspecError, ProtocolError) as error:
        kind = schema.kind if schema else None
        return Malformed(kind, *_who(kind, body), reason=str(error)[:_MAX_REASON])


def _who(kind: type[Message] | None, body: bytes) -> tuple[str, Epoch]:
    """Session id and epoch as far as they can be read: messages of sessions start with them."""
    try:
        values = msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return "", Epoch(0, 0)
    if kind is m.LoadReport:
        return "", Epoch(0, 0)  # of a replica, not of a session
    match values:
        case [str(session_id), [int(incarnation), int(placement)], *_]:
            return session_id[:MAX_NAME], Epoch(incarnation, placement)
        case [str(session_id), int(incarnation), *_] if kind in (m.Generate, m.Committed):
            return session_id[:MAX_NAME], Epoch(incarnation, 0)
        case [str(session_id), *_]:
            return session_id[:MAX_NAME], Epoch(0, 0)
    return "", Epoch(0, 0)


# What the types cannot say. Token ids are left alone: what is in the vocabulary is the services' business.


def _check_draft_block(block: m.DraftBlock) -> None:
    _check_support(block)
    confidence = block.confidence
    if len(confidence) == 0:
        return
    if len(confidence) != len(block.token_ids):
        raise ProtocolError(f"{len(block.token_ids)} draft tokens came with {len(confidence)} confidences")
    # NaN, which both reductions pass on, fails the comparison.
    if not 0 <= np.minimum.reduce(confidence) <= np.maximum.reduce(confidence) <= 1:
        raise ProtocolError("expected confidences in [0, 1]")


def _check_support(block: m.DraftBlock | m.VerifyRequest) -> None:
    """Only that the rows can be read; whether they are a law is judged by sparse_law, where a fault costs a draft."""
    support = block.support
    if support is None:
        return
    ids, starts, counts = support.ids, support.starts, support.counts
    if len(starts) != len(block.token_ids) + 1 or len(ids) != len(counts):
        shape = f"{len(starts)} starts, {len(ids)} ids, {len(counts)} counts"
        raise ProtocolError(f"{len(block.token_ids)} draft tokens came with a support of {shape}")
    if starts[0] != 0 or starts[-1] != len(ids) or bool((starts[1:] < starts[:-1]).any()):
        raise ProtocolError(f"support rows must rise from 0 to {len(ids)}")


def _check_logprobs(message: m.Committed | m.VerifyResult) -> None:
    """Only the shapes; how many tokens there are to speak of is judged where they are committed."""
    for logprobs in (message.logprobs, message.prompt_logprobs):
        if logprobs is not None:
            _check_logprob_shapes(logprobs)


def _check_logprob_shapes(logprobs: m.TokenLogprobs) -> None:
    tokens, best = len(logprobs.chosen), len(logprobs.top_ids)
    if best != len(logprobs.top) or (best % tokens if tokens else best):
        raise ProtocolError(
            f"log-probabilities of {tokens} tokens came with {best} best ids, {len(logprobs.top)} values"
        )


def _check_committed(burst: m.Committed) -> None:
    _check_logprobs(burst)
    if burst.logprobs is not None and len(burst.logprobs.chosen) != len(burst.token_ids):
        raise ProtocolError(f"{len(burst.token_ids)} tokens came with {len(burst.logprobs.chosen)} log-probabilities")


def _check_draft_request(request: m.DraftRequest) -> None:
    if len(request.new_tokens) > request.base_len:
        raise ProtocolError(f"{len(request.new_tokens)} new tokens cannot end at length {request.base_len}")


def _check_prompt(opening: m.Generate | m.OpenSession) -> None:
    if not 1 <= opening.prompt_len <= len(opening.tokens):
        raise ProtocolError(f"expected prompt_len in 1..{len(opening.tokens)}, got {opening.prompt_len}")


def _check_feature_rows(features: m.FeatureRows) -> None:
    if features.width < 1 or len(features.values) % features.width:
        raise ProtocolError(f"{len(features.values)} values do not make rows of {features.width}")


def _check_load_report(report: m.LoadReport) -> None:
    if report.utilisation > 1:
        raise ProtocolError(f"expected utilisation in [0, 1], got {report.utilisation}")


_CHECKS: dict[type[Message], Callable[[Any], None]] = {
    m.DraftBlock: _check_draft_block,
    m.VerifyRequest: _check_support,
    m.VerifyResult: _check_logprobs,
    m.Committed: _check_committed,
    m.DraftRequest: _check_draft_request,
    m.Generate: _check_prompt,
    m.OpenSession: _check_prompt,
    m.FeatureRows: _check_feature_rows,
    m.LoadReport: _check_load_report,
}


# --- kinds of messages ---------------------------------------------------------------------------------------------


class _Schema:
    def __init__(self, tag: int, kind: type[Message]) -> None:
        self.tag = tag
        self.kind = kind
        self.record: Record[Any] = Record(kind)
        self.decoder = msgspec.msgpack.Decoder(self.record.wire_type)


_ENCODER = msgspec.msgpack.Encoder()
_HEAD_DECODER: msgspec.msgpack.Decoder[list[tuple[int, Annotated[int, Meta(ge=0)], bytes]]] = msgspec.msgpack.Decoder(
    list[tuple[int, Annotated[int, Meta(ge=0)], bytes]]
)
_SCHEMA_OF_TAG = {tag: _Schema(tag, kind) for tag, kind in _TAGS.items()}
_SCHEMA_OF_KIND = {schema.kind: schema for schema in _SCHEMA_OF_TAG.values()}
