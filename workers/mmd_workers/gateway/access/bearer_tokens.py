"""JSON Web Tokens that clients send instead of an API key: whether a token is valid here, and which tenant it names.

No message quotes a token or a claim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jwt

from mmd_api.contract.errors import InvalidTokenError
from mmd_api.spec.gateway import OidcSpec
from mmd_workers.gateway.access.issuer import IssuerKeys
from mmd_workers.observe.metrics import Metrics

CLOCK_SKEW_SECONDS = 30
MAX_SUBJECT_CHARACTERS = 128
REQUIRED = ("exp", "iss", "aud")
_BEGIN = b"eyJ"  # `{"` in base64

_FAULTS: dict[type[Exception], str] = {
    jwt.ExpiredSignatureError: "has expired",
    jwt.ImmatureSignatureError: "is not valid yet",
    jwt.InvalidAudienceError: "is for another audience",
    jwt.InvalidIssuerError: "is of another issuer",
    jwt.MissingRequiredClaimError: f"lacks one of the claims {', '.join(REQUIRED)}",
    jwt.InvalidAlgorithmError: "is signed with an algorithm that is not accepted for this key",
    jwt.InvalidSignatureError: "has an invalid signature",
}


@dataclass(frozen=True, slots=True)
class Bearer:
    """The owner of a valid token. `tenant`: the name in its claim; empty if there is none. `subject`: for the audit log."""

    tenant: str
    subject: str


class TokenVerifier:
    """Checks the tokens of one issuer."""

    def __init__(self, spec: OidcSpec, metrics: Metrics) -> None:
        self._spec = spec
        self.default_tenant = spec.default_tenant
        self.keys = IssuerKeys(spec.issuer, metrics)

    async def bearer(self, token: bytes) -> Bearer:
        """The owner of this token.

        Raises:
            InvalidTokenError: the token is not valid here and now.
            IssuerUnavailableError: the token cannot be checked.
        """
        key = await self.keys.find(_key_id(token))
        try:
            claims = jwt.decode(
                token,
                key.key,
                algorithms=list(key.algorithms),
                audience=self._spec.audience,
                issuer=self._spec.issuer,
                leeway=CLOCK_SKEW_SECONDS,
                options={"require": list(REQUIRED)},
            )
        except Exception as error:  # noqa: BLE001 - no token, and no error of the library about it, may do more than cause a refusal
            fault = next(
                (words for kind, words in _FAULTS.items() if isinstance(error, kind)), "is malformed"
            )
            raise InvalidTokenError(f"the token {fault}; get a new one from the issuer") from None
        return Bearer(_text(claims, self._spec.tenant_claim), _text(claims, "sub")[:MAX_SUBJECT_CHARACTERS])


def is_token(credential: bytes) -> bool:
    """True if a credential has the form of a JSON Web Token: three parts, the first of them an object."""
    return credential.startswith(_BEGIN) and credential.count(b".") == 2


def _key_id(token: bytes) -> str:
    try:
        kid = jwt.get_unverified_header(token).get("kid", "")
    except Exception:  # noqa: BLE001 - as in `bearer`
        raise InvalidTokenError("the token is malformed; get a new one from the issuer") from None
    return str(kid)


def _text(claims: dict[str, Any], name: str) -> str:
    value = claims.get(name)
    return value if isinstance(value, str) else ""
