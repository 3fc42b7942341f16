"""The protocol of a feature transfer: OFFER, GRANT, CHUNK x n, CREDIT, on the bulk connection. Independent of the model.

Flow control is byte credit: the receiver reserves the whole feature in its budget before it grants, and the sender never
has more than the granted window unacknowledged. Chunks carry their sequence number and offset, the offer a blake2b-128
digest of all bytes; any gap, repetition, reordering or damage fails the transfer at both ends, and the sender offers again.
"""

from __future__ import annotations

import hashlib

MAX_CHUNK_BYTES = 960 << 10
RETRY_SECONDS = 0.05  # pause before an offer is repeated


def new_digest() -> hashlib.blake2b:
    """A new digest, for all bytes of a feature, tensor after tensor."""
    return hashlib.blake2b(digest_size=16)
