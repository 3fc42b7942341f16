"""The endpoints under /v1/files, compatible with OpenAI's: upload, list, get, read and delete files."""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import quote

from pydantic_core import to_json
from starlette.datastructures import Headers, QueryParams

from mmd_api.contract.errors import (
    DeadlineError,
    ForbiddenError,
    InvalidValueError,
    MmdError,
    NotFoundError,
    RequestTimeoutError,
    RequestTooLargeError,
    UnknownParameterError,
    UnsupportedMediaTypeError,
)
from mmd_workers.gateway.answers.exchange import Exchange, until_gone
from mmd_workers.gateway.api.endpoint import Endpoint
from mmd_workers.gateway.api.files.files_answer import DeletedFile, FileList, FileObject
from mmd_workers.gateway.api.files.upload_form import FORM_BYTES, PURPOSES, UploadForm
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.body import Chunks
from mmd_workers.gateway.basics.media_hold import RequestReservation
from mmd_workers.gateway.basics.strict import MAX_NAME_CHARACTERS
from mmd_workers.gateway.intake.file_kind import HEAD_BYTES, kind_of
from mmd_workers.gateway.intake.tenant_files import Files
from mmd_workers.wire.stored_files import CHUNK_BYTES, StoredFile

FEED_BYTES = 16 << 10
"""A form is parsed in parts of this size: each takes a few milliseconds at worst, and other requests take turns in between."""
UPLOAD_BYTES = 2 * CHUNK_BYTES  # the memory that an upload or a download holds
LISTED_FILE_BYTES = 2048  # the memory for one file in a list: its entry and its JSON
MAX_LISTED = 10_000
LIST_FIELDS = ("after", "limit", "order", "purpose")


class _FilesEndpoint(Endpoint, ABC):
    """The common part of the files endpoints."""

    prefix = "fr-"
    counts = False

    @abstractmethod
    async def _serve(self, exchange: Exchange, files: Files, reservation: RequestReservation) -> None:
        """Answer the request."""

    async def _respond(self, exchange: Exchange, reservation: RequestReservation) -> None:
        files = self._files()
        self._set_deadline(exchange)
        try:
            async with asyncio.timeout(max(0.0, self._deadline(exchange) - time.time())):
                await self._serve(exchange, files, reservation)
        except TimeoutError as error:
            late = self._late()
            if not exchange.timeline.status:
                raise late from error
            exchange.timeline.code, exchange.timeline.error = late.code, late.message
            # The response has begun: the connection closes, and the client notices that bytes of the declared length are missing.

    def _late(self) -> MmdError:
        return DeadlineError(
            "the store of files did not answer before the request deadline; retry, or raise x-request-timeout or "
            "spec.gateway.requestTimeoutSeconds"
        )

    def _files(self) -> Files:
        if self._gateway.files is None:
            raise NotFoundError(
                "this deployment stores no files; send media in the request, or set spec.gateway.files"
            )
        return self._gateway.files

    def _tenant(self, exchange: Exchange) -> str:
        """The name of the tenant; without API keys all clients are one tenant without a name."""
        return exchange.tenant.name if exchange.tenant else ""

    def _file_id(self, exchange: Exchange) -> str:
        return str(exchange.scope["path_params"]["file_id"])


class UploadFile(_FilesEndpoint):
    """POST /v1/files."""

    async def _respond(self, exchange: Exchange, reservation: RequestReservation) -> None:
        try:
            await super()._respond(exchange, reservation)
        except (MmdError, ApiError) as error:
            self._gateway.metrics.refused_uploads.labels(error.code).inc()
            raise

    async def _serve(self, exchange: Exchange, files: Files, reservation: RequestReservation) -> None:
        await reservation.resize(UPLOAD_BYTES)
        stored = await self._upload(exchange, files, self._deadline(exchange))
        await exchange.reply(200, to_json(shown(stored)))
        if self._gateway.encode_on_upload is not None:
            self._gateway.encode_on_upload.add(stored)

    def _late(self) -> MmdError:
        return RequestTimeoutError(
            "the file was incomplete at the request deadline (x-request-timeout or spec.gateway.requestTimeoutSeconds); send it faster"
        )

    async def _upload(self, exchange: Exchange, files: Files, deadline: float) -> StoredFile:
        headers = exchange.headers
        self._check_origin(headers)
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise UnsupportedMediaTypeError("content-encoding is not supported; send the file uncompressed")
        form = UploadForm(headers.get("content-type", ""))
        upload = _Upload(files, self._tenant(exchange), form, _most_bytes(headers, files), deadline)
        try:
            return await self._receive(exchange, files, form, upload)
        except BaseException:
            await upload.give_up()
            raise

    def _check_origin(self, headers: Headers) -> None:
        """Refuse a form from a page of another site: browsers send forms, unlike JSON, without a preflight request."""
        origin = headers.get("origin")
        if origin is None or origin in self._gateway.settings.allowed_origins:
            return
        if origin.partition("://")[2] != headers.get("host"):
            raise ForbiddenError(
                "a web page of another site may upload no files; add its origin to spec.gateway.cors.allowedOrigins"
            )

    async def _receive(
        self, exchange: Exchange, files: Files, form: UploadForm, upload: _Upload
    ) -> StoredFile:
        """Store the file chunk by chunk as it arrives; a file that is not a medium is refused before anything is stored."""
        body, total = Chunks(exchange.receive), 0
        while not body.ended:
            piece = await body.next()
            total += len(piece)
            for start in range(0, len(piece), FEED_BYTES):
                form.feed(piece[start : start + FEED_BYTES])
                await asyncio.sleep(0)
            upload.check_size()
            if total > files.max_file_bytes + FORM_BYTES:
                raise _too_large(files.max_file_bytes)
            while len(form.data) >= CHUNK_BYTES:
                chunk = bytes(memoryview(form.data)[:CHUNK_BYTES])
                del form.data[:CHUNK_BYTES]
                await upload.store(chunk)
        form.check_complete()
        purpose, lifetime = form.purpose(), form.lifetime_seconds(files.spec.lifetime_seconds)
        if form.data:
            chunk = bytes(form.data)
            form.data.clear()
            await upload.store(chunk)
        return await upload.finish(purpose, lifetime)


class _Upload:
    """A tenant's upload while it is stored. It reserves `most_bytes` at its first chunk, unless that chunk is not the beginning of a medium."""

    def __init__(self, files: Files, tenant: str, form: UploadForm, most_bytes: int, deadline: float) -> None:
        self._files, self._tenant, self._form = files, tenant, form
        self._most_bytes, self._deadline = most_bytes, deadline
        self._entry: StoredFile | None = None
        self._digest = hashlib.sha256()
        self._num_chunks, self._num_bytes = 0, 0

    def check_size(self) -> None:
        """Check that the received bytes fit within the upload's limit.

        Raises:
            RequestTooLargeError: they do not.
        """
        if self._num_bytes + len(self._form.data) > self._most_bytes:
            raise _too_large(self._most_bytes)

    async def store(self, chunk: bytes) -> None:
        """Store the next chunk.

        Raises:
            ApiError: it is the first chunk, and no medium begins with these bytes.
            FileQuotaError, PeerLostError, OverloadedError: see `Files.begin`.
        """
        form = self._form
        if self._entry is None:
            kind = kind_of(chunk[:HEAD_BYTES], form.content_type, form.filename)
            reserved_bytes = len(chunk) if form.complete and not form.data else self._most_bytes
            entry = await self._files.begin(self._tenant, reserved_bytes, self._deadline)
            self._entry = replace(entry, modality=kind)
        self._digest.update(chunk)
        await self._files.store(self._entry, self._num_chunks, chunk)
        self._num_chunks, self._num_bytes = self._num_chunks + 1, self._num_bytes + len(chunk)

    async def finish(self, purpose: str, lifetime_seconds: int) -> StoredFile:
        """Make the file available.

        Raises:
            ApiError: the file is empty.
            FileNotFoundInStoreError, PeerLostError, OverloadedError: see `Files.finish`.
        """
        if self._entry is None:
            raise ApiError(
                InvalidValueError("file: it is empty; send a file with at least one byte"), param="file"
            )
        now = int(time.time())
        entry = replace(
            self._entry,
            created_at=now,
            expires_at=now + lifetime_seconds,
            num_bytes=self._num_bytes,
            filename=self._form.filename,
            purpose=purpose,
            digest=self._digest.hexdigest(),
        )
        return await self._files.finish(entry)

    async def give_up(self) -> None:
        """Discard everything stored of the upload."""
        if self._entry is not None:
            await self._files.give_up(self._entry)


class ListFiles(_FilesEndpoint):
    """GET /v1/files."""

    async def _serve(self, exchange: Exchange, files: Files, reservation: RequestReservation) -> None:
        await until_gone(exchange.receive, self._list(exchange, files, reservation))

    async def _list(self, exchange: Exchange, files: Files, reservation: RequestReservation) -> None:
        query = QueryParams(exchange.scope.get("query_string", b""))
        limit, newest_first, purpose, after = _list_options(query)
        listed = [
            file for file in await files.of_tenant(self._tenant(exchange)) if purpose in ("", file.purpose)
        ]
        if newest_first:
            listed.reverse()
        if after:
            position = next((n for n, file in enumerate(listed) if file.file_id == after), None)
            if position is None:
                unknown = InvalidValueError(
                    f"after: no file {after[:MAX_NAME_CHARACTERS]!r} in this list; send the id of one, or omit it"
                )
                raise ApiError(unknown, param="after")
            listed = listed[position + 1 :]
        page = listed[:limit]
        await reservation.resize(LISTED_FILE_BYTES * len(page))
        body = FileList(
            data=[shown(file) for file in page],
            first_id=page[0].file_id if page else None,
            last_id=page[-1].file_id if page else None,
            has_more=len(listed) > limit,
        )
        await exchange.reply_in_pieces([await asyncio.to_thread(to_json, body)])


class GetFile(_FilesEndpoint):
    """GET /v1/files/{file_id}."""

    async def _serve(self, exchange: Exchange, files: Files, _reservation: RequestReservation) -> None:
        stored = await files.find(self._tenant(exchange), self._file_id(exchange))
        await exchange.reply(200, to_json(shown(stored)))


class DeleteFile(_FilesEndpoint):
    """DELETE /v1/files/{file_id}."""

    async def _serve(self, exchange: Exchange, files: Files, _reservation: RequestReservation) -> None:
        file_id = self._file_id(exchange)
        await files.delete(self._tenant(exchange), file_id)
        await exchange.reply(200, to_json(DeletedFile(id=file_id)))


class GetContent(_FilesEndpoint):
    """GET /v1/files/{file_id}/content."""

    async def _serve(self, exchange: Exchange, files: Files, reservation: RequestReservation) -> None:
        await reservation.resize(UPLOAD_BYTES)
        await until_gone(exchange.receive, self._send(exchange, files))

    def _late(self) -> MmdError:
        return DeadlineError(
            "the file was not read completely before the request deadline; read it faster, or raise x-request-timeout or "
            "spec.gateway.requestTimeoutSeconds"
        )

    async def _send(self, exchange: Exchange, files: Files) -> None:
        """Send the bytes as they were uploaded. They are for programs: a browser must not show them as a page of this origin."""
        stored = await files.find(self._tenant(exchange), self._file_id(exchange))
        chunks = files.chunks(stored)
        first = await anext(chunks)
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(stored.num_bytes),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(stored.filename, safe='')}",
            "x-content-type-options": "nosniff",
            "x-request-id": exchange.request_id,
            **exchange.notes,
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        exchange.timeline.status = 200
        await exchange.send({"type": "http.response.start", "status": 200, "headers": raw})
        await exchange.send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for chunk in chunks:
                await exchange.send({"type": "http.response.body", "body": chunk, "more_body": True})
        except MmdError as error:
            # The connection closes, and the client notices that bytes of the declared length are missing.
            exchange.timeline.code, exchange.timeline.error = error.code, error.message
            return
        await exchange.send({"type": "http.response.body", "body": b""})


def shown(stored: StoredFile) -> FileObject:
    """A file in the form of OpenAI's API."""
    return FileObject(
        id=stored.file_id,
        bytes=stored.num_bytes,
        created_at=int(stored.created_at),
        expires_at=int(stored.expires_at),
        filename=stored.filename,
        purpose=stored.purpose,
    )


def _list_options(query: Mapping[str, str]) -> tuple[int, bool, str, str]:
    """The limit, whether the newest files come first, the purpose ("": all), and the id before the first listed file ("": none)."""
    for name in query:
        if name not in LIST_FIELDS:
            shown_name = name[:MAX_NAME_CHARACTERS]
            unknown = UnknownParameterError(f"{shown_name}: unknown parameter; send {', '.join(LIST_FIELDS)}")
            raise ApiError(unknown, param=shown_name)
    limit, order, purpose = (
        query.get("limit", str(MAX_LISTED)),
        query.get("order", "desc"),
        query.get("purpose", ""),
    )
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 5 and 1 <= int(limit) <= MAX_LISTED):
        raise ApiError(InvalidValueError(f"limit: send a number from 1 to {MAX_LISTED}"), param="limit")
    if order not in ("asc", "desc"):
        raise ApiError(InvalidValueError("order: send asc or desc"), param="order")
    if purpose not in ("", *PURPOSES):
        raise ApiError(InvalidValueError(f"purpose: send {' or '.join(PURPOSES)}"), param="purpose")
    return int(limit), order == "desc", purpose, query.get("after", "")


def _most_bytes(headers: Headers, files: Files) -> int:
    """The most bytes an upload may have. A content-length beside a transfer-encoding is ignored: the server reads the chunks (RFC 9112, 6.3)."""
    max_bytes, declared = files.max_file_bytes, headers.get("content-length", "")
    if "transfer-encoding" in headers or not declared.isdigit():
        return max_bytes
    if int(declared[:19]) > max_bytes + FORM_BYTES:
        raise _too_large(max_bytes)
    return min(max_bytes, int(declared[:19]))


def _too_large(most_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"file: it is larger than {most_bytes} bytes; send a smaller one, or raise spec.gateway.files.maxFileMebibytes"
    )
