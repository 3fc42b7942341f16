"""What an uploaded file is, by its first bytes: of a container that may hold video or sound alone, what its sender says it is. Opens nothing."""

from __future__ import annotations

import mimetypes

from mmd_api.contract.errors import BadMediaError
from mmd_api.contract.pools import MODALITIES
from mmd_workers.media.containers import CONTAINERS, DOCUMENT, sniff
from mmd_workers.media.medium import MediumKind

HEAD_BYTES = 4096


def kind_of(head: bytes, content_type: str, filename: str) -> MediumKind:
    """The kind of a file, of which `head` is the beginning.

    Raises:
        BadMediaError: no format that is served.
    """
    container = sniff(head)
    if container == DOCUMENT:
        return "document"
    kinds = [kind for kind in MODALITIES if container in CONTAINERS[kind]]
    if not kinds:
        served = ", ".join(sorted(frozenset({DOCUMENT}).union(*CONTAINERS.values())))
        raise BadMediaError(
            f"file: unknown format (its first bytes match no supported format); send one of: {served}"
        )
    for named in (content_type, mimetypes.guess_type(filename)[0] or ""):
        main = named.partition("/")[0].strip().lower()
        for kind in kinds:
            if kind == main:
                return kind
    return kinds[0]
