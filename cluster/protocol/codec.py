"""A batch of messages as one frame of bytes, and back. Knows nothing of links, sessions or what the numbers mean.

    header   magic "OUTR", version u16, reserved u16, head bytes u32, array bytes u32        (little-endian)
    head     msgpack [[tag, array bytes, body], ...], zero-padded to 8; body = msgpack of the field values in order
    arrays   every array of every message, packed little-endian in order; the body holds their lengths

The field types of messages.py are the schema: their order is the wire order, checked strictly on the way in. A damaged
frame raises; a damaged message inside a sound frame comes out as `Malformed` and harms only its session.
"""

import dataclasses
import struct
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from cluster.protocol import messages as m
from cluster.protocol.errors import ProtocolError
from cluster.protocol.messages import PROTOCOL_VERSION, Epoch, Message

MAX_FRAME_BYTES = 64 * 2**20  # on both ends of every carrier; 16 million token ids

_MAGIC = b"OUTR"
_HEADER = struct.Struct("<4sHHII")
_ALIGNMENT = 8

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
}

_MAX_TEXT = 65_536  # characters of an error message
_MAX_NAME = 256  # characters of a session or replica id
_MAX_FLOAT = 1e12  # also refuses infinity; NaN fails every bound
# Lengths, counts and positions are 0 .. 2^31-1, as positions are int32. The exceptions (None = 64 bits):
_INT_BOUNDS: dict[str, tuple[int, int | None]] = {
    "key": (0, None),
    "block_id": (0, None),
    "incarnation": (0, None),
    "placement": (0, None),
    "next_token": (-1, 2**31 - 1),
    "kept_len": (-1, 2**31 - 1),
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
        own: list[NDArray[Any]] = []
        body = _ENCODER.encode(schema.record.pack(message, own))
        entries.append((schema.tag, sum(array.nbytes for array in own), body))
        arrays += own
    return _join(entries, arrays)


def encode_malformed(message: Message) -> bytes:
    """A sound frame with `message` in it as a malformed one: its last fields are missing. For fault injection."""
    schema = _SCHEMA_OF_KIND[type(message)]
    body = msgspec.msgpack.decode(_ENCODER.encode(schema.record.pack(message, [])))
    return _join([(schema.tag, 0, _ENCODER.encode(body[:2]))], [])


def _join(entries: Sequence[tuple[int, int, bytes]], arrays: Sequence[NDArray[Any]]) -> bytes:
    head = _ENCODER.encode(entries)
    padding = bytes(-len(head) % _ALIGNMENT)
    array_bytes = sum(array.nbytes for array in arrays)
    size = _HEADER.size + len(head) + len(padding) + array_bytes
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a batch of {len(entries)} messages takes {size} bytes, the limit is {MAX_FRAME_BYTES}")
    header = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, 0, len(head), array_bytes)
    return b"".join((header, head, padding, *(array.data for array in arrays)))


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
    batch: list[Message | Malformed] = []
    for tag, array_bytes, body in entries:
        batch.append(_decode_message(tag, body, memoryview(frame)[at : at + array_bytes]))
        at += array_bytes
    return batch


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


def _decode_message(tag: int, body: bytes, arrays: memoryview) -> Message | Malformed:
    schema = _SCHEMA_OF_TAG.get(tag)
    try:
        if schema is None:
            raise ProtocolError(f"expected a message tag in 1..{max(_TAGS)}, got {tag}")
        reader = _ArrayReader(arrays)
        message: Message = schema.record.unpack(schema.decoder.decode(body), reader)
        reader.expect_end()
        _check_values(message)
        return message
    except (msgspec.MsgspecError, ProtocolError) as error:
        kind = schema.kind if schema else None
        return Malformed(kind, *_who(kind, body), reason=str(error))


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
            return session_id[:_MAX_NAME], Epoch(incarnation, placement)
        case [str(session_id), int(incarnation), *_] if kind in (m.Generate, m.Committed):
            return session_id[:_MAX_NAME], Epoch(incarnation, 0)
        case [str(session_id), *_]:
            return session_id[:_MAX_NAME], Epoch(0, 0)
    return "", Epoch(0, 0)


def _check_values(message: Message) -> None:
    """What the types cannot say. Token ids are left alone: what is in the vocabulary is the services' business."""
    match message:
        case m.DraftBlock(token_ids=tokens, confidence=confidence):
            if len(confidence) not in (0, len(tokens)):
                raise ProtocolError(f"{len(tokens)} draft tokens came with {len(confidence)} confidences")
            if not np.all((confidence >= 0) & (confidence <= 1)):
                raise ProtocolError("expected confidences in [0, 1]")
        case m.DraftRequest(base_len=base_len, new_tokens=tokens):
            if len(tokens) > base_len:
                raise ProtocolError(f"{len(tokens)} new tokens cannot end at length {base_len}")
        case m.Generate(tokens=tokens, prompt_len=prompt_len) | m.OpenSession(tokens=tokens, prompt_len=prompt_len):
            if not 1 <= prompt_len <= len(tokens):
                raise ProtocolError(f"expected prompt_len in 1..{len(tokens)}, got {prompt_len}")
        case m.LoadReport(utilisation=utilisation):
            if utilisation > 1:
                raise ProtocolError(f"expected utilisation in [0, 1], got {utilisation}")


class _ArrayReader:
    """Hands out one message's arrays in order."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._at = 0

    def take(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        end = self._at + count * dtype.itemsize
        if end > len(self._buffer):
            raise ProtocolError(f"arrays take at least {end} bytes, the message has {len(self._buffer)}")
        array: NDArray[Any] = np.frombuffer(self._buffer[self._at : end], dtype=dtype)
        self._at = end
        return array

    def expect_end(self) -> None:
        if self._at != len(self._buffer):
            raise ProtocolError(f"arrays take {self._at} bytes, the message has {len(self._buffer)}")


# --- the schema, read off the dataclasses once at import -----------------------------------------------------------

_Pack = Callable[[Any, list[NDArray[Any]]], object]  # value, arrays to append to -> msgpack value
_Unpack = Callable[[Any, _ArrayReader], Any]
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class _Field:
    wire_type: Any  # what msgspec checks
    pack: _Pack = lambda value, _: value
    unpack: _Unpack = lambda value, _: value


class _Record(Generic[K]):
    """A dataclass or NamedTuple as the tuple of its fields."""

    def __init__(self, kind: type[K]) -> None:
        self._kind = kind
        self._names = _field_names(kind)
        hints = get_type_hints(kind)
        self._fields = [_field(name, hints[name]) for name in self._names]
        self.wire_type: Any = tuple.__class_getitem__(tuple(field.wire_type for field in self._fields))

    def pack(self, value: K, arrays: list[NDArray[Any]]) -> object:
        pairs = zip(self._names, self._fields, strict=True)
        return [field.pack(getattr(value, name), arrays) for name, field in pairs]

    def unpack(self, values: Sequence[Any], reader: _ArrayReader) -> K:
        pairs = zip(values, self._fields, strict=True)
        return self._kind(*[field.unpack(value, reader) for value, field in pairs])


def _field_names(kind: type) -> tuple[str, ...]:
    named: tuple[str, ...] | None = getattr(kind, "_fields", None)  # a NamedTuple's
    return named or tuple(field.name for field in dataclasses.fields(kind))


def _field(name: str, hint: Any) -> _Field:
    if get_origin(hint) is np.ndarray:
        return _array_field(np.dtype(get_args(get_args(hint)[1])[0]))
    if get_origin(hint) is types.UnionType:
        return _optional(_field(name, get_args(hint)[0]))
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        record = _Record(hint)
        return _Field(record.wire_type, record.pack, record.unpack)
    return _Field(_bounded(name, hint))


def _array_field(dtype: np.dtype[Any]) -> _Field:
    wire = dtype.newbyteorder("<")

    def pack(array: NDArray[Any], arrays: list[NDArray[Any]]) -> int:
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            raise TypeError(f"expected a one-dimensional {dtype} array, got {array!r}")
        arrays.append(np.ascontiguousarray(array, dtype=wire))
        return len(array)

    return _Field(_bounded("", int), pack, lambda count, reader: reader.take(count, wire))


def _optional(field: _Field) -> _Field:
    return _Field(
        field.wire_type | None,
        lambda value, arrays: None if value is None else field.pack(value, arrays),
        lambda value, reader: None if value is None else field.unpack(value, reader),
    )


def _bounded(name: str, hint: Any) -> Any:
    """`hint` with the bounds that msgspec enforces on the way in."""
    if hint is int:
        low, high = _INT_BOUNDS.get(name, (0, 2**31 - 1))
        return Annotated[int, Meta(ge=low, le=high)]
    if hint is float:
        return Annotated[float, Meta(ge=0.0, le=_MAX_FLOAT)]
    if hint is str:
        is_id = name in ("session_id", "replica_id")
        return Annotated[str, Meta(min_length=int(is_id), max_length=_MAX_NAME if is_id else _MAX_TEXT)]
    if get_origin(hint) is tuple:
        items = tuple(part if part is Ellipsis else _bounded(name, part) for part in get_args(hint))
        return tuple.__class_getitem__(items)
    return hint  # bool and Literal carry their own bounds


class _Schema:
    def __init__(self, tag: int, kind: type[Message]) -> None:
        self.tag = tag
        self.kind = kind
        self.record: _Record[Any] = _Record(kind)
        self.decoder = msgspec.msgpack.Decoder(self.record.wire_type)


def _schemas() -> Iterator[_Schema]:
    for tag, kind in _TAGS.items():
        yield _Schema(tag, kind)


_ENCODER = msgspec.msgpack.Encoder()
_HEAD_DECODER: msgspec.msgpack.Decoder[list[tuple[int, Annotated[int, Meta(ge=0)], bytes]]] = msgspec.msgpack.Decoder(
    list[tuple[int, Annotated[int, Meta(ge=0)], bytes]]
)
_SCHEMA_OF_TAG = {schema.tag: schema for schema in _schemas()}
_SCHEMA_OF_KIND = {schema.kind: schema for schema in _SCHEMA_OF_TAG.values()}
