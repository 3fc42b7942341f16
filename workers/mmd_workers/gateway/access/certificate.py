"""The certificate that the gateway presents to its clients: read from a mounted Secret, fully checked, replaced without a restart.

Connections keep the certificate they began with. No message quotes the private key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from mmd_api.spec.gateway import TLS_CERTIFICATE, TLS_KEY
from mmd_workers.observe.metrics import Metrics
from mmd_workers.process.live import LiveSecret

MAX_PAIR_BYTES = 256 << 10
_SEPARATOR = "\0"  # joins the two files into one text

_log = logging.getLogger(__name__)


class InvalidCertificateError(ValueError):
    """The certificate and key cannot be used together; the message names the file at fault and the remedy."""


class UnusableNowError(InvalidCertificateError):
    """The certificate and key cannot be used now, but perhaps later without a change."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate with its key, ready to serve. `expires`: when clients begin to refuse it."""

    context: ssl.SSLContext
    expires: datetime


class Certificate:
    """The certificate in force."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._pair: Pair | None = None
        self.fault = "not read yet"
        metrics.certificate_rejected.set(0)

    @property
    def unavailable(self) -> str:
        """The reason no connection can be accepted; empty once a valid pair has been read."""
        return f"no valid TLS certificate: {self.fault}" if self._pair is None else ""

    def context(self) -> ssl.SSLContext | None:
        """The TLS context for new connections; None if there is no certificate."""
        return self._pair.context if self._pair is not None else None

    def take(self, pair: Pair) -> None:
        """Present this pair to new connections."""
        self._pair, self.fault = pair, ""
        self._metrics.certificate_expiry.set(pair.expires.timestamp())

    def summary(self) -> dict[str, Any]:
        """The section of `/debug/state` about the certificate."""
        expires = self._pair.expires.isoformat() if self._pair is not None else None
        return {"enabled": True, "expires": expires, "fault": self.fault}


class LiveCertificate(LiveSecret):
    """Follows the two files of a mounted Secret. If they cannot be used, the last valid pair stays in force."""

    def __init__(self, folder: Path, certificate: Certificate, metrics: Metrics) -> None:
        super().__init__(folder, MAX_PAIR_BYTES)
        self._certificate, self._metrics = certificate, metrics

    def _read(self) -> str:
        texts = []
        for name in (TLS_CERTIFICATE, TLS_KEY):
            with (self._file / name).open("rb") as file:
                texts.append(file.read(self._max_bytes + 1).decode(errors="replace"))
        return _SEPARATOR.join(texts)

    async def _take(self, text: str) -> None:
        chain, _, key = text.partition(_SEPARATOR)
        try:
            pair = await asyncio.to_thread(load_pair, chain.encode(), key.encode())
        except UnusableNowError:
            self._text = None  # makes the next check try again
            raise
        self._certificate.take(pair)
        _log.info("TLS certificate in force until %s, from %s", pair.expires.isoformat(), self._file)

    def _rejected(self, reason: str) -> None:
        if reason != self._certificate.fault:
            consequence = (
                "connections are refused"
                if self._certificate.unavailable
                else "the last valid one stays in force"
            )
            _log.error(
                "cannot use the TLS certificate of %s, %s: %s; fix the Secret that spec.gateway.tls.secretName names",
                self._file,
                consequence,
                reason,
            )
        self._certificate.fault = reason
        self._metrics.certificate_rejected.set(1)

    def _accepted(self) -> None:
        self._metrics.certificate_rejected.set(0)


def load_pair(chain: bytes, key: bytes) -> Pair:
    """Create a TLS context from a certificate chain, the gateway's own certificate first, and its private key, both in PEM.

    Raises:
        InvalidCertificateError: they cannot be used, do not belong together, or the certificate has expired or is not valid yet.
    """
    try:
        return _loaded(chain, key)
    except InvalidCertificateError:
        raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UnusableNowError(f"cannot load {TLS_CERTIFICATE} and {TLS_KEY} ({reason})") from None
    except Exception as error:  # noqa: BLE001 - no file, and no error of the libraries about it, may end the gateway
        raise InvalidCertificateError(
            f"cannot read {TLS_CERTIFICATE} and {TLS_KEY} ({type(error).__name__}); create them anew"
        ) from None


def _loaded(chain: bytes, key: bytes) -> Pair:
    try:
        certificate = x509.load_pem_x509_certificates(chain)[0]
        begins, expires, public = (
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
            certificate.public_key(),
        )
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        raise InvalidCertificateError(
            f"{TLS_CERTIFICATE} is no chain of PEM certificates; write the gateway's own first, then those of its issuers"
        ) from None
    if _private(key).public_key() != public:
        raise InvalidCertificateError(
            f"{TLS_KEY} is not the key of the first certificate in {TLS_CERTIFICATE}; replace both together, the gateway's own certificate first"
        )
    if datetime.now(UTC) >= expires:
        raise InvalidCertificateError(
            f"{TLS_CERTIFICATE} has expired ({expires.isoformat()}); renew it and check the clock"
        )
    if datetime.now(UTC) < begins:
        raise UnusableNowError(
            f"{TLS_CERTIFICATE} is not valid before {begins.isoformat()}; wait until then, or check the clock"
        )
    return Pair(_context(chain, key), expires)


def _private(key: bytes) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(key, password=None)
    except TypeError:
        raise InvalidCertificateError(f"{TLS_KEY} is encrypted; write it without a passphrase") from None
    except (ValueError, UnsupportedAlgorithm):
        raise InvalidCertificateError(f"{TLS_KEY} is no PEM private key; write one") from None


def _context(chain: bytes, key: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    # `ssl` reads only files, and the two may change between our reading and its own.
    descriptor = os.memfd_create("tls")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(chain + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=_no_password)
    except ssl.SSLError as error:
        reason = str(error.reason or "no reason given").replace("_", " ").lower()
        raise InvalidCertificateError(
            f"OpenSSL refuses {TLS_CERTIFICATE} and {TLS_KEY} ({reason}); create them anew"
        ) from None
    finally:
        os.close(descriptor)
    return context


def _no_password() -> str:
    raise InvalidCertificateError(f"{TLS_KEY} is encrypted; write it without a passphrase")
