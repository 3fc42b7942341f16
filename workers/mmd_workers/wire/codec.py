"""Packs and unpacks messages: msgpack, checked against the dataclasses of `messages` on arrival. Independent of connections.

A `Frame` is a message followed by raw bytes: 4 bytes of header length (little endian), the msgpack header, the payload.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaSerializer, SchemaValidator

from mmd_api.contract.errors import TooLongError, WireError

T = TypeVar("T")

MAX_MESSAGE_BYTES = 1 << 20  # the default max_payload of a NATS server
MAX_REQUEST_BYTES = 32 << 20  # `Bus` sends a request in parts if it exceeds one message
MAX_DEPTH = 16
_LENGTH = struct.Struct("<I")
_SCALARS = frozenset({"int", "float", "str", "bool"})


@dataclass(frozen=True, slots=True)
class Frame:
    """A message and the raw bytes that follow it."""

    header: Any
    payload: bytes | bytearray | memoryview


def pack(message: object, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Pack a message dataclass.

    Raises:
        TooLongError: the message is larger than `max_bytes`.
        WireError: the message contains a value that msgpack cannot carry.
    """
    try:
        data: bytes = msgpack.packb(_serializer(type(message)).to_python(message), use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{type(message).__name__} cannot be packed: {error}") from error
    if len(data) > max_bytes:
        raise TooLongError(
            f"{type(message).__name__} is {len(data)} bytes packed, more than the limit of {max_bytes}; split it"
        )
    return data


def unpack(message_type: type[T], data: bytes | memoryview, max_bytes: int = MAX_MESSAGE_BYTES) -> T:
    """Unpack a message. Fields unknown to this version are ignored; numbers and strings are never converted.

    Raises:
        WireError: the data is not msgpack, not of this type, too deep, or too large.
    """
    name = message_type.__name__
    if len(data) > max_bytes:
        raise WireError(f"{name}: {len(data)} bytes received, more than the limit of {max_bytes}")
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"{name}: not msgpack ({type(error).__name__}: {error})") from error
    _check_depth(value, name)
    if not isinstance(value, dict):
        raise WireError(f"{name}: expected a map, got {type(value).__name__}")
    try:
        message: T = _validator(message_type).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        raise WireError(f"{name}.{where}: {first['msg']} ({error.error_count()} errors)") from error
    return message


def pack_frame(header: object, payload: bytes | bytearray | memoryview) -> bytes:
    """Pack a message and the bytes that follow it into one NATS message; the payload is copied once.

    Raises:
        WireError: as for `pack`, or both together exceed one NATS message.
    """
    head = pack(header)
    size = _LENGTH.size + len(head) + memoryview(payload).nbytes
    if size > MAX_MESSAGE_BYTES:
        raise WireError(f"a frame of {size} bytes exceeds {MAX_MESSAGE_BYTES}; use smaller chunks")
    return b"".join((_LENGTH.pack(len(head)), head, payload))


def unpack_frame(header_type: type[T], data: bytes) -> tuple[T, memoryview]:
    """Split a frame into its header and a view of its payload; nothing is copied.

    Raises:
        WireError: the frame is truncated, or `unpack` refuses its header.
    """
    if len(data) < _LENGTH.size:
        raise WireError(f"a frame of {len(data)} bytes has no room for its header's length")
    (length,) = _LENGTH.unpack_from(data)
    view = memoryview(data)
    if _LENGTH.size + length > len(view):
        raise WireError(f"frame header of {length} bytes exceeds the frame of {len(view)} bytes")
    return unpack(header_type, view[_LENGTH.size : _LENGTH.size + length]), view[_LENGTH.size + length :]


def warm_up(message_types: Iterable[type]) -> None:
    """Build the serializers and validators of these messages, so that the first message of each type need not wait."""
    for message_type in message_types:
        _serializer(message_type)
        _validator(message_type)


_serializers: dict[type, SchemaSerializer] = {}
_validators: dict[type, SchemaValidator] = {}


def _serializer(message_type: type) -> SchemaSerializer:
    if message_type not in _serializers:
        _serializers[message_type] = SchemaSerializer(TypeAdapter(message_type).core_schema)
    return _serializers[message_type]


def _validator(message_type: type) -> SchemaValidator:
    """A validator that takes maps for dataclasses but converts no scalar.

    Pydantic's own strict mode would also insist on dataclass instances, which data from a wire cannot be.
    """
    if message_type not in _validators:
        schema = _strict_scalars(TypeAdapter(message_type).core_schema)
        _validators[message_type] = SchemaValidator(schema)
    return _validators[message_type]


def _strict_scalars(node: Any) -> Any:
    if isinstance(node, dict):
        copy = {key: _strict_scalars(value) for key, value in node.items()}
        if copy.get("type") in _SCALARS:
            copy["strict"] = True
        return copy
    if isinstance(node, list):
        return [_strict_scalars(item) for item in node]
    return node


def _check_depth(value: object, name: str) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = (
            [
                child
                for container in level
                for child in (container.values() if type(container) is dict else container)
                if type(child) is dict or type(child) is list
            ]
            if type(level[0]) in (dict, list)
            else []
        )
        if not level:
            return
    raise WireError(f"{name}: nested deeper than {MAX_DEPTH} levels")
