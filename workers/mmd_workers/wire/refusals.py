"""Carries a handler's error in the reply to its requester, where it is raised again. Independent of connections."""

from __future__ import annotations

from dataclasses import dataclass

from nats.aio.msg import Msg

from mmd_api.contract.errors import MmdError, error_of
from mmd_workers.wire.codec import pack, unpack

REFUSED_HEADER = "Mmd-Refused"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The `MmdError` of a handler as data, sent instead of a reply."""

    code: str
    message: str


def refusal_of(error: MmdError) -> tuple[bytes, dict[str, str]]:
    """Data and headers of a reply with this error."""
    return pack(Refusal(error.code, error.message[:4096])), {REFUSED_HEADER: error.code}


def raise_refusal(reply: Msg) -> None:
    """Raise the error in a reply, if there is one.

    Raises:
        MmdError: the error that the handler on the other side raised.
    """
    if reply.headers and REFUSED_HEADER in reply.headers:
        refusal = unpack(Refusal, reply.data)
        raise error_of(refusal.code, refusal.message)
