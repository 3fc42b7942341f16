"""Responses of /v1/files as pydantic models, in the form of OpenAI's API. Independent of where files are stored."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class FileObject(BaseModel):
    """An uploaded file. `created_at`, `expires_at`: Unix seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(BaseModel):
    """A page of the tenant's files. `has_more`: files follow after `last_id`."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """The id of a file that no longer exists."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
