"""Certificates of servers for tests, signed by a test authority."""

from __future__ import annotations

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
PEM = serialization.Encoding.PEM
LOOPBACK = x509.SubjectAlternativeName(
    [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
)


class Authority:
    """Signs certificates of servers on this machine. `pem`: its own certificate, which clients trust."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("tests")
        self._certificate = (
            self._builder(self._name, self._key, timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = self._certificate.public_bytes(PEM).decode()

    def trusted(self) -> ssl.SSLContext:
        """TLS of a client that trusts this authority and no other."""
        return ssl.create_default_context(cadata=self.pem)

    def issue(
        self,
        valid: timedelta = timedelta(days=1),
        key: Key | None = None,
        begins: timedelta = timedelta(days=-3),
    ) -> dict[str, str]:
        """A certificate and its key, as the entries of a Secret.

        `begins`, `valid`: its validity, from now on.
        """
        key = key or ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._builder(_name("server"), key, valid, begins)
            .add_extension(LOOPBACK, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return {"tls.crt": certificate.public_bytes(PEM).decode() + self.pem, "tls.key": key_pem(key)}

    def _builder(
        self, subject: x509.Name, key: Key, valid: timedelta, begins: timedelta = timedelta(days=-3)
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + valid)
        )


def key_pem(key: Key, password: bytes | None = None) -> str:
    """A private key, encrypted if there is a password."""
    locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, locked).decode()


def serial_of(pem: str) -> int:
    """The serial number of the first certificate in a PEM text."""
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
