"""The messages of Envoy's external processing for an endpoint picker, parsed by protobuf's C parser (upb).

Names, numbers and types come from `envoy/service/ext_proc/v3/external_processor.proto`, from the messages it uses in
`envoy/config/core/v3/base.proto` and `envoy/type/v3/http_status.proto`, and from `google/protobuf/struct.proto`;
`tests/gateway/picker/test_ext_proc_messages.py` compares them with Envoy's own. Unlisted fields are skipped, enums are integers, and maps are
lists of entries, which have the same encoding. No package on PyPI can replace the table: xds-protos overwrites files of opentelemetry-proto,
and envoy-data-plane parses messages in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = "Process"
NONE, FULL_DUPLEX_STREAMED = 0, 4
"""Values of `ProcessingMode.BodySendMode`.

`NONE`: the proxy sends no body. `FULL_DUPLEX_STREAMED`: it sends the body, and forwards only what comes back.
"""
OVERWRITE_IF_EXISTS_OR_ADD = 2
"""A value of `HeaderValueOption.HeaderAppendAction`."""
MAX_HEAD_BYTES = 128 << 10
"""The largest message other than a piece of a body."""
MAX_MESSAGE_BYTES = (1 << 20) + (64 << 10)
"""Proxies send a piece of a body as they read it: up to their buffer limit, which defaults to 1 MiB."""

MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {},
    "HeaderMap": {"headers": (1, "repeated HeaderValue")},
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "Metadata": {"filter_metadata": (1, "repeated FilterMetadataEntry")},
    "FilterMetadataEntry": {"key": (1, "string"), "value": (2, "Struct")},
    "Struct": {"fields": (1, "repeated FieldsEntry")},
    "FieldsEntry": {"key": (1, "string"), "value": (2, "Value")},
    "Value": {"string_value": (3, "string"), "struct_value": (5, "Struct"), "list_value": (6, "ListValue")},
    "ListValue": {"values": (1, "repeated Value")},
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, "Struct"),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {},
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeaderMutation": {"set_headers": (1, "repeated HeaderValueOption")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "HttpStatus": {"code": (1, "int32")},
    # The part of a ProcessingRequest that may be large: as many bytes of headers or values would take too long to parse.
    "BodyRequest": {"request_body": (4, "HttpBody"), "response_body": (5, "HttpBody")},
}
ONE_OF: Mapping[str, frozenset[str]] = {
    "ProcessingRequest": frozenset(
        f"{side}_{part}" for side in ("request", "response") for part in ("headers", "body", "trailers")
    ),
    "BodyRequest": frozenset({"request_body", "response_body"}),
    "Value": frozenset({"string_value", "struct_value", "list_value"}),
}
"""Groups of fields, of which each message has at most one."""

_SCALARS = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "string": FieldDescriptorProto.TYPE_STRING,
}
_PACKAGE = "mmd.ext_proc"


def _classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="mmd/ext_proc.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        if name in ONE_OF:
            message.oneof_decl.add(name="kind")
        for field_name, (number, kind) in fields.items():
            base_type, is_repeated = kind.removeprefix("repeated "), kind.startswith("repeated ")
            label = (
                FieldDescriptorProto.LABEL_REPEATED if is_repeated else FieldDescriptorProto.LABEL_OPTIONAL
            )
            field = message.field.add(name=field_name, number=number, label=label)
            if base_type in _SCALARS:
                field.type = _SCALARS[base_type]
            else:
                field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{base_type}"
            if field_name in ONE_OF.get(name, ()):
                field.oneof_index = 0
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in MESSAGES}


CLASSES = _classes()
"""The message classes, by name."""
ProcessingRequest = CLASSES["ProcessingRequest"]
ProcessingResponse = CLASSES["ProcessingResponse"]


class InvalidMessageError(Exception):
    """The bytes are not a message of the protocol, or the message is out of order."""


def parse(data: bytes) -> Any:
    """Parse a message from a proxy. In a large message only a piece of a body is read.

    Raises:
        InvalidMessageError: the bytes are not a message.
    """
    kind = ProcessingRequest if len(data) <= MAX_HEAD_BYTES else CLASSES["BodyRequest"]
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidMessageError("the bytes are no ProcessingRequest") from error
