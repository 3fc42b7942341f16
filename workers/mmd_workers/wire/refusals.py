"""An error that a handler raised, as the reply to its requester, where it is raised again. Independent of connections."""

from __future__ import annotations

from dataclasses import dataclass

from nats.aio.msg import Msg

from mmd_api.contract.errors import MmdError, error_of
from mmd_workers.wire.codec import pack, unpack

REFUSED_HEADER = "Mmd-Refused"


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a server answers instead of a reply when its handler raised: an `MmdError` as data."""

    code: str
    message: str


def refusal_of(error: MmdError) -> tuple[bytes, dict[str, str]]:
    """The error as a reply: data and headers."""
    return pack(Refusal(error.code, error.message[:4096])), {REFUSED_HEADER: error.code}


def raise_refusal(reply: Msg) -> None:
    """Do nothing if this is a reply, and not an error.

    Raises:
        MmdError: the very error that the handler on the other side raised.
    """
    if reply.headers and REFUSED_HEADER in reply.headers:
        refusal = unpack(Refusal, reply.data)
        raise error_of(refusal.code, refusal.message)
