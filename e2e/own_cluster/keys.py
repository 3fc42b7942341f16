"""The certificates of a cluster that lives for minutes: one authority, and a key for each program."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = timedelta(days=2)


class Authority:
    """Signs certificates and writes them, with their keys, as NAME.crt and NAME.key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "e2e")])
        certificate = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self._write("ca", certificate, self._key)
        self.certificate = folder / "ca.crt"

    def issue(self, file: str, common_name: str, group: str = "", addresses: Sequence[str] = ()) -> None:
        """A certificate for this user of this group, and for a server with these IP addresses or names."""
        names = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if group:
            names.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = self._builder(x509.Name(names), key).add_extension(
            x509.ExtendedKeyUsage(usages), critical=False
        )
        if addresses:
            alternatives = x509.SubjectAlternativeName([_general_name(address) for address in addresses])
            builder = builder.add_extension(alternatives, critical=False)
        self._write(file, builder.sign(self._key, hashes.SHA256()), key)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + VALID)
        )

    def _write(self, file: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        pem = serialization.Encoding.PEM
        secret = key.private_bytes(
            pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        (self.folder / f"{file}.crt").write_bytes(certificate.public_bytes(pem))
        path = self.folder / f"{file}.key"
        path.touch(mode=0o600)
        path.write_bytes(secret)


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)
