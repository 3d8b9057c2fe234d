"""How a dataclass becomes a msgpack array plus numpy arrays, read off its field types once; and the bounds on values.

Field order is wire order: a record is the array of its fields, nested records nest, a numpy array leaves its length in
its place and its bytes beside, filled up to whole words of 4 so that the next one is aligned. Bounds hold on the way
in. Knows nothing of frames or of what the values mean.
"""

import dataclasses
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Generic, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from cluster.protocol.errors import ProtocolError

_WORD = 4  # bytes
MAX_NAME = 256  # characters of a session or replica id
_MAX_TEXT = 65_536  # characters of an error message
_MAX_FLOAT = 1e12  # also refuses infinity; NaN fails every bound
# Lengths, counts and positions are 0 .. 2^31-1, as positions are int32. The exceptions (None = 64 bits):
_INT_BOUNDS: dict[str, tuple[int, int | None]] = {
    "key": (0, None),
    "block_id": (0, None),
    "incarnation": (0, None),
    "placement": (0, None),
    "next_token": (-1, 2**31 - 1),
    "kept_len": (-1, 2**31 - 1),
    "prefix_query_tokens": (0, None),
    "prefix_hit_tokens": (0, None),
    "prefix_evicted_pages": (0, None),
    "preemptions": (0, None),
}
# Durations, shares and the like are 0 .. _MAX_FLOAT. The exceptions:
_FLOAT_BOUNDS: dict[str, tuple[float, float]] = dict.fromkeys(
    ("frequency_penalty", "presence_penalty", "logit_bias"), (-_MAX_FLOAT, _MAX_FLOAT)
)


class ArrayReader:
    """Hands out a frame's arrays in order, and no message another one's."""

    def __init__(self, frame: bytes, at: int) -> None:
        self._frame = frame
        self._at = self._begin = self._end = at

    def begin(self, array_bytes: int) -> None:
        """The next message, whose arrays take so many bytes; whatever was left of the last one is skipped."""
        self._at = self._begin = self._end
        self._end += array_bytes

    def take(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        at, size = self._at, _whole_words(count * dtype.itemsize)
        if at + size > self._end:
            self._refuse(at + size)
        self._at += size
        return np.frombuffer(self._frame, dtype, count, at)

    def expect_end(self) -> None:
        if self._at != self._end:
            self._refuse(self._at)

    def _refuse(self, reached: int) -> NoReturn:
        taken, given = reached - self._begin, self._end - self._begin
        raise ProtocolError(f"arrays take {taken} bytes, the message has {given}")


_Pack = Callable[[Any, list[NDArray[Any]]], object]  # value, arrays to append to -> msgpack value
_Unpack = Callable[[Any, ArrayReader], Any]
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class _Field:
    wire_type: Any  # what msgspec checks
    pack: _Pack | None = None  # None: msgpack takes the value as it is
    unpack: _Unpack | None = None


class Record(Generic[K]):
    """A dataclass or NamedTuple `kind`. `wire_type` is what msgspec must have checked before `unpack`."""

    def __init__(self, kind: type[K]) -> None:
        names = _field_names(kind)
        hints = get_type_hints(kind)
        self.fields = [_field(name, hints[name]) for name in names]
        self.wire_type: Any = tuple.__class_getitem__(tuple(field.wire_type for field in self.fields))
        self._kind = kind
        self._values = attrgetter(*names)
        # Most fields pass as they are; only the others cost Python.
        self._packs = [(i, field.pack) for i, field in enumerate(self.fields) if field.pack is not None]
        self._unpacks = [(i, field.unpack) for i, field in enumerate(self.fields) if field.unpack is not None]

    def pack(self, value: K, arrays: list[NDArray[Any]]) -> Sequence[object]:
        values = list(self._values(value))
        for i, pack in self._packs:
            values[i] = pack(values[i], arrays)
        return values

    def unpack(self, wire: Sequence[Any], reader: ArrayReader) -> K:
        values = list(wire)
        for i, unpack in self._unpacks:
            values[i] = unpack(values[i], reader)
        return self._kind(*values)


def _field_names(kind: type) -> tuple[str, ...]:
    named: tuple[str, ...] | None = getattr(kind, "_fields", None)  # a NamedTuple's
    return named or tuple(field.name for field in dataclasses.fields(kind))


def _field(name: str, hint: Any) -> _Field:
    if get_origin(hint) is np.ndarray:
        return _array_field(np.dtype(get_args(get_args(hint)[1])[0]))
    if get_origin(hint) is types.UnionType:
        return _optional(_field(name, get_args(hint)[0]))
    if hasattr(hint, "_fields"):
        return _Field(Record(hint).wire_type, unpack=lambda values, _: hint._make(values))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        record: Record[Any] = Record(hint)
        return _Field(record.wire_type, record.pack, record.unpack)
    return _Field(_bounded(name, hint))


def _array_field(dtype: np.dtype[Any]) -> _Field:
    wire = dtype.newbyteorder("<")

    def pack(array: NDArray[Any], arrays: list[NDArray[Any]]) -> int:
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            got = f"{array.ndim}-dimensional {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(f"expected a one-dimensional {dtype} array, got {got}")
        count = len(array)
        filler = _whole_words(array.nbytes) - array.nbytes
        if filler:
            array = np.append(array, np.zeros(filler // array.itemsize, array.dtype))
        arrays.append(np.ascontiguousarray(array, dtype=wire))
        return count

    return _Field(_bounded("", int), pack, lambda count, reader: reader.take(count, wire))


def _whole_words(size: int) -> int:
    return -(-size // _WORD) * _WORD


def _optional(field: _Field) -> _Field:
    pack, unpack = field.pack, field.unpack
    return _Field(
        field.wire_type | None,
        pack and (lambda value, arrays: None if value is None else pack(value, arrays)),
        unpack and (lambda value, reader: None if value is None else unpack(value, reader)),
    )


def _bounded(name: str, hint: Any) -> Any:
    """`hint` with the bounds that msgspec enforces on the way in."""
    if hint is int:
        low, high = _INT_BOUNDS.get(name, (0, 2**31 - 1))
        return Annotated[int, Meta(ge=low, le=high)]
    if hint is float:
        least, most = _FLOAT_BOUNDS.get(name, (0.0, _MAX_FLOAT))
        return Annotated[float, Meta(ge=least, le=most)]
    if hint is str:
        is_id = name in ("session_id", "replica_id")
        return Annotated[str, Meta(min_length=int(is_id), max_length=MAX_NAME if is_id else _MAX_TEXT)]
    if get_origin(hint) is tuple:
        items = tuple(part if part is Ellipsis else _bounded(name, part) for part in get_args(hint))
        return tuple.__class_getitem__(items)
    return hint  # bool and Literal carry their own bounds
