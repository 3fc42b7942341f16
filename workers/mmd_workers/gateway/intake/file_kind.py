"""Detects the kind of an uploaded file by its first bytes, and by the sender's declaration if these are ambiguous. Opens nothing.

A container that may hold video or sound alone is ambiguous.
"""

from __future__ import annotations

import mimetypes

from mmd_api.contract.errors import BadMediaError
from mmd_api.contract.pools import MODALITIES
from mmd_workers.media.containers import CONTAINERS, DOCUMENT, sniff
from mmd_workers.media.formats.unserved import unserved
from mmd_workers.media.medium import MediumKind

HEAD_BYTES = 4096


def kind_of(head: bytes, content_type: str, filename: str) -> MediumKind:
    """The kind of a file that begins with `head`.

    Raises:
        BadMediaError: the format is not supported.
    """
    container = sniff(head)
    if container == DOCUMENT:
        return "document"
    kinds = [kind for kind in MODALITIES if container in CONTAINERS[kind]]
    if not kinds:
        if (known := unserved(head)) is not None:
            raise BadMediaError(f"file: this is {known[0]}, which is not served; {known[1]}")
        served = ", ".join(sorted(frozenset({DOCUMENT}).union(*CONTAINERS.values())))
        raise BadMediaError(
            f"file: unknown format (its first bytes match no supported format); send one of: {served}"
        )
    guessed = "" if container in CONTAINERS["image"] else mimetypes.guess_type(filename)[0] or ""
    for media_type in (content_type, guessed):
        main_type = media_type.partition("/")[0].strip().lower()
        for kind in kinds:
            if kind == main_type:
                return kind
    return kinds[0]
