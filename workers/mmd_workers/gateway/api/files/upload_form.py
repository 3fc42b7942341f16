"""Parses the form of an upload while it arrives: fields and the bytes of one file. Independent of where the bytes go."""

from __future__ import annotations

import re
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from mmd_api.contract.errors import (
    InvalidValueError,
    MissingParameterError,
    UnknownParameterError,
    UnsupportedMediaTypeError,
)
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.strict import MAX_NAME_CHARACTERS

MAX_FIELD_BYTES = 1024
MAX_FILENAME_BYTES = 255
MAX_BOUNDARY_BYTES = 70  # RFC 2046, 5.1.1
FORM_BYTES = 64 << 10  # the most bytes of a body besides its file
PURPOSES = ("user_data", "vision")
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FIELDS = ("purpose", _ANCHOR, _SECONDS)
_WHOLE = re.compile(r"[0-9]{1,10}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class UploadForm:
    """Parses a form piece by piece. `data`: bytes of the file that have arrived and that the caller has not yet removed."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
            raise UnsupportedMediaTypeError(
                f"content-type {content_type[:64]!r} is not supported; send multipart/form-data with a boundary of up to {MAX_BOUNDARY_BYTES} characters"
            )
        self.data = bytearray()
        self.filename = ""
        self.content_type = ""
        self.complete = False
        self._has_file = False
        self._fields: dict[str, bytearray] = {}
        self._field: bytearray | None = None  # the current part's value; None if the part is the file
        self._header, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        callbacks: Any = {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take,
            "on_end": self._end,
        }
        self._parser = MultipartParser(boundary, callbacks)

    def feed(self, piece: bytes) -> None:
        """Take the next piece of the body.

        Raises:
            ApiError: the form is not valid for an upload; the error names the field.
        """
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise ApiError(
                InvalidValueError(
                    f"the body is no valid multipart form ({str(error)[:200]}); send it as curl -F does"
                )
            ) from error

    def purpose(self) -> str:
        """The purpose of the file.

        Raises:
            ApiError: it is missing or not served.
        """
        purpose = self._text("purpose")
        if purpose is None:
            raise ApiError(
                MissingParameterError(f"purpose is missing; send {' or '.join(PURPOSES)}"), param="purpose"
            )
        if purpose not in PURPOSES:
            fault = InvalidValueError(
                f"purpose: {purpose[:MAX_NAME_CHARACTERS]!r} is not served; send {' or '.join(PURPOSES)}"
            )
            raise ApiError(fault, param="purpose")
        return purpose

    def lifetime_seconds(self, most: int) -> int:
        """The seconds until the file expires; `most` if the form does not set them.

        Raises:
            ApiError: the value is out of range.
        """
        anchor, seconds = self._text(_ANCHOR), self._text(_SECONDS)
        if anchor is None and seconds is None:
            return most
        if anchor != "created_at":
            fault = InvalidValueError(f"{_ANCHOR}: missing, or no moment that is served; send created_at")
            raise ApiError(fault, param=_ANCHOR)
        if seconds is None or not _WHOLE.fullmatch(seconds) or not 1 <= int(seconds) <= most:
            fault = InvalidValueError(
                f"{_SECONDS}: missing or out of range; send whole seconds from 1 to {most}, or raise spec.gateway.files.lifetimeSeconds"
            )
            raise ApiError(fault, param=_SECONDS)
        return int(seconds)

    def check_complete(self) -> None:
        """Check that the form is complete and has a file.

        Raises:
            ApiError: it is incomplete or has no file.
        """
        if not self.complete:
            raise ApiError(
                InvalidValueError(
                    "the body ends before its multipart form does; send the complete form, with its last boundary"
                )
            )
        if not self._has_file:
            raise ApiError(
                MissingParameterError("file is missing; send it as a part with a filename"), param="file"
            )

    def _text(self, name: str) -> str | None:
        value = self._fields.get(name)
        return None if value is None else value.decode(errors="replace")

    def _begin_part(self) -> None:
        self._headers.clear()
        self._field = None

    def _end_header(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode(errors="replace")
        if kind != b"form-data" or not name:
            raise ApiError(
                InvalidValueError(
                    'a part of the form has no name; send content-disposition: form-data; name="file"'
                )
            )
        if name == "file":
            if self._has_file:
                raise ApiError(
                    InvalidValueError("file: the form has several; upload one at a time"), param="file"
                )
            if b"filename" not in options:
                raise ApiError(InvalidValueError("file: the part has no filename; send one"), param="file")
            self._has_file = True
            self.filename = _base_name(options[b"filename"].decode(errors="replace"))
            self.content_type = self._headers.get(b"content-type", b"").decode(errors="replace")[:128]
            return
        shown = name[:MAX_NAME_CHARACTERS]
        if name not in FIELDS:
            raise ApiError(
                UnknownParameterError(f"{shown}: unknown field; send file, {', '.join(FIELDS)}"), param=shown
            )
        if name in self._fields:
            raise ApiError(InvalidValueError(f"{shown}: the form has it twice; send it once"), param=shown)
        self._field = self._fields[name] = bytearray()

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self.data += memoryview(data)[start:end]
            return
        self._field += memoryview(data)[start:end]
        if len(self._field) > MAX_FIELD_BYTES:
            raise ApiError(
                InvalidValueError(
                    f"a field of the form has more than {MAX_FIELD_BYTES} bytes; send a shorter value"
                )
            )

    def _end(self) -> None:
        self.complete = True


def _base_name(filename: str) -> str:
    """The name without folders, which some clients send, and without characters invisible in logs or headers. No file of this name is opened."""
    name = _CONTROL.sub("", re.split(r"[/\\]", filename)[-1]).strip()
    shortened = name.encode()[:MAX_FILENAME_BYTES].decode(errors="ignore")
    return shortened if shortened not in ("", ".", "..") else "file"
