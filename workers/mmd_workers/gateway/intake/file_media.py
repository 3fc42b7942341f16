"""Uploaded files as the media of a request, and documents as the images of their pages. Independent of the network and the model."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pybase64

from mmd_api.contract.errors import BadMediaError, FileNotFoundInStoreError, MmdError, UnsupportedInputError
from mmd_api.spec.media import MediaPolicy
from mmd_workers.gateway.basics.api_errors import ApiError, refused
from mmd_workers.gateway.content.parts import MediaSource
from mmd_workers.gateway.intake.file_kind import HEAD_BYTES, kind_of
from mmd_workers.gateway.intake.tenant_files import Files, unknown
from mmd_workers.media.fetch import MAX_URL_CHARACTERS, Reserve, fetch, plain_base64
from mmd_workers.media.medium import MediumInfo
from mmd_workers.wire.stored_files import StoredFile

HEAD_CHARACTERS = HEAD_BYTES // 3 * 4


class FileMedia:
    """The media of one request, some of them uploaded files of `tenant`. `files`: None if the deployment stores none."""

    def __init__(self, files: Files | None, tenant: str) -> None:
        self._files, self._tenant = files, tenant
        self._stored_files: dict[str, StoredFile] = {}
        self._reads: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._bytes: dict[str, bytes] = {}

    async def settled(self, sources: Sequence[MediaSource]) -> list[MediaSource]:
        """The sources, with the kind of each file.

        Raises:
            ApiError: a file does not exist, is no medium, or is of another kind than its part; names the part.
        """
        file_ids = {source.file_id for source in sources if source.file_id}
        if self._files is not None and file_ids:
            self._stored_files |= await self._files.find_each(self._tenant, file_ids)
        return [await self._settled(source) if _is_open(source) else source for source in sources]

    async def bytes_of(self, source: MediaSource, policy: MediaPolicy, reserve: Reserve) -> bytes:
        """The bytes of a settled source; the same object for all sources with one file. `reserve(more_bytes)` is called before more are held.

        Raises:
            FetchError, OverloadedError: see `fetch`.
            FileNotFoundInStoreError, LinkError, PeerLostError: see `Files.read`.
            BadMediaError: the file is larger than the limit of its kind.
        """
        if not source.file_id:
            return await fetch(source.url, policy, source.kind, reserve)
        assert self._files is not None
        stored = self._stored_files[source.file_id]
        limit = getattr(policy, source.modality).max_bytes
        if stored.num_bytes > limit:
            raise BadMediaError(
                f"the {source.modality} has {stored.num_bytes} bytes, more than the limit of {limit}; upload a smaller one, or raise "
                f"spec.gateway.media.{source.modality}.maxBytes"
            )
        async with self._reads[source.file_id]:
            if source.file_id not in self._bytes:
                try:
                    self._bytes[source.file_id] = await self._files.read(stored, reserve)
                except FileNotFoundInStoreError as error:
                    raise _missing(source, error) from error
            return self._bytes[source.file_id]

    async def _settled(self, source: MediaSource) -> MediaSource:
        param = source.param
        if not source.file_id:
            try:
                head = await asyncio.to_thread(_head_of, source.url)
                return replace(source, modality=kind_of(head, _declared_type(source.url), ""))
            except MmdError as error:
                raise refused(error, param) from error
        if self._files is None:
            unsupported = UnsupportedInputError(
                f"{param}: this deployment stores no files; send the bytes in the request, or set spec.gateway.files"
            )
            raise ApiError(unsupported, param=param)
        stored = self._stored_files.get(source.file_id)
        if stored is None:
            raise _missing(source, unknown(source.file_id))
        if source.modality not in ("file", stored.modality):
            mismatch = BadMediaError(
                f"{param}: the file is of kind {stored.modality}, and this part is for {source.modality}; use a part of type file"
            )
            raise ApiError(mismatch, param=param)
        return replace(source, modality=stored.modality)


def expanded(
    messages: Sequence[dict[str, Any]], sources: Sequence[MediaSource], infos: Sequence[Sequence[MediumInfo]]
) -> tuple[list[dict[str, Any]], list[MediaSource], list[MediumInfo]]:
    """The frontend's messages with a part for each medium: each page of a document in order, and the sound of a video."""
    remaining = iter(zip(sources, infos, strict=True))
    all_sources: list[MediaSource] = []
    all_infos: list[MediumInfo] = []
    expanded_messages = []
    for message in messages:
        content: list[dict[str, Any]] = []
        for part in message["content"]:
            if part["type"] == "text":
                content.append(part)
                continue
            source, media = next(remaining)
            all_sources += [source] * len(media)
            all_infos += media
            content += [{"type": info.modality} for info in media]
        expanded_messages.append({**message, "content": content})
    return expanded_messages, all_sources, all_infos


def _missing(source: MediaSource, error: FileNotFoundInStoreError) -> ApiError:
    return ApiError(FileNotFoundInStoreError(f"{source.param}: {error.message}"), param=source.param)


def _is_open(source: MediaSource) -> bool:
    return bool(source.file_id) or source.modality == "file"


def _declared_type(url: str) -> str:
    return url[5:MAX_URL_CHARACTERS].partition(",")[0].partition(";")[0]


def _head_of(url: str) -> bytes:
    """The first bytes of a data URL. Other faults of the URL are found when it is read."""
    begin = url.find(",", 0, MAX_URL_CHARACTERS) + 1
    if not url[:begin].lower().endswith(";base64,"):
        return url[begin : begin + HEAD_BYTES].encode(errors="replace")
    text = plain_base64(url[begin : begin + HEAD_CHARACTERS])
    try:
        return pybase64.b64decode(text[: len(text) // 4 * 4], validate=True)
    except ValueError as error:
        raise BadMediaError(
            f"the data is not valid base64 ({error}); encode the file's bytes again"
        ) from error
