"""Tenants and their API keys: the file `keys.yaml` of the Secret that `spec.gateway.auth` names, and its keys
and hashes.

The file has hashes, never keys. A key is 256 random bits, which nobody can guess from a hash, so one SHA-256
without a salt is enough. Independent of the gateway. No message quotes a value of the file, which might be a
key that someone put there by mistake. Names of tenants are quoted once they are known to be names.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, AwareDatetime, Field
from pydantic_core import PydanticCustomError

from mmd_api.base import ApiModel
from mmd_api.faults import InvalidDeploymentError, parse
from mmd_api.resource import UniqueKeyLoader
from mmd_api.spec.fields import TenantName

KEYS_FILE = "keys.yaml"
MAX_FILE_BYTES = 256 << 10
MAX_TENANTS = 256
KEY_PREFIX = "mmd-"
KEY_BYTES = 32
HASH_PREFIX = "sha256:"


def _refuse_null(value: object) -> object:
    """Refuse a field that restricts its tenant and has no value.

    To take it as omitted would lift the restriction.
    """
    if value is None:
        raise PydanticCustomError("null", "null")
    return value


_NotNull = AfterValidator(_refuse_null)

Priority = Literal["High", "Normal", "Low"]


class ApiKey(ApiModel):
    """An API key, which only its holder has."""

    hash: Annotated[str, Field(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")]
    """`sha256:` and the SHA-256 of the whole key in hexadecimal."""
    expires: Annotated[AwareDatetime | None, _NotNull] = None
    """From when it is invalid; with a time zone, such as 2027-06-30T00:00:00Z."""


class TenantLimits(ApiModel):
    """Limits of a tenant, over all gateways of the deployment."""

    concurrent_requests: Annotated[Annotated[int, Field(ge=1, le=100_000)] | None, _NotNull] = None
    """Maximum number of requests in flight."""
    requests_per_minute: Annotated[Annotated[int, Field(ge=1, le=10_000_000)] | None, _NotNull] = None
    """Maximum number of requests in any minute."""
    work_seconds_per_minute: Annotated[Annotated[int, Field(ge=1, le=10_000_000)] | None, _NotNull] = None
    """Maximum work that is started in any minute, in seconds of the whole deployment."""
    tokens_per_day: Annotated[Annotated[int, Field(ge=1, le=1_000_000_000_000)] | None, _NotNull] = None
    """Maximum number of prompt and output tokens in a day of UTC."""


class Tenant(ApiModel):
    """Who may use the gateway."""

    name: TenantName
    """Name in metrics and timelines."""
    keys: Annotated[list[ApiKey], Field(max_length=64)]
    """API keys, each of which stands for the tenant. To rotate, add one, have clients use it, and remove the old one."""
    models: Annotated[
        Annotated[list[Annotated[str, Field(max_length=512)]], Field(min_length=1, max_length=64)] | None,
        _NotNull,
    ] = None
    """Names of the models and adapters that the tenant may use; omitted: all."""
    limits: TenantLimits = TenantLimits()
    """Limits of the tenant."""
    priority: Priority = "Normal"
    """Share of the deployment where tenants wait for one another: that of a High tenant is 4 times, that of a Low one a quarter of a Normal one's."""


class _KeysFile(ApiModel):
    tenants: Annotated[list[Tenant], Field(max_length=MAX_TENANTS)]


class InvalidKeysError(ValueError):
    """A file of keys cannot be used; the message names fields, lines and tenants, and quotes no other value."""


class _Loader(UniqueKeyLoader):
    """Refuses aliases: a few of them make a small file large."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)


def parse_tenants(text: str) -> tuple[Tenant, ...]:
    """Read the content of a file of keys.

    Raises:
        InvalidKeysError: with everything that is wrong with it.
    """
    if len(text.encode()) > MAX_FILE_BYTES:
        raise InvalidKeysError(f"is larger than {MAX_FILE_BYTES >> 10} KiB; remove tenants and old keys")
    try:
        data: Any = yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of SafeLoader
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InvalidKeysError(
            f"{where}invalid YAML, a key twice in a mapping, or an alias; fix it"
        ) from None
    except RecursionError:
        raise InvalidKeysError("is nested too deeply; flatten it") from None
    except Exception:  # noqa: BLE001 - PyYAML's constructors raise anything for a tag with an invalid value
        raise InvalidKeysError("is not readable as YAML; fix it") from None
    try:
        tenants = parse(_KeysFile, data, secret=True).tenants
    except InvalidDeploymentError as error:
        raise InvalidKeysError("; ".join(str(fault) for fault in error.faults)) from None
    _refuse_duplicates(tenants)
    return tuple(tenants)


def _refuse_duplicates(tenants: Iterable[Tenant]) -> None:
    names: set[str] = set()
    owners: dict[str, tuple[str, int]] = {}
    for tenant in tenants:
        if tenant.name in names:
            raise InvalidKeysError(f"tenant {tenant.name} is listed twice; list all its keys in one entry")
        names.add(tenant.name)
        for number, key in enumerate(tenant.keys):
            present = (tenant.name, number)
            owner, first = owners.setdefault(key.hash, present)
            if (owner, first) == present:
                continue
            if owner == tenant.name:
                raise InvalidKeysError(
                    f"keys[{first}] and keys[{number}] of tenant {owner} are the same; remove one of them"
                )
            raise InvalidKeysError(
                f"keys[{number}] of tenant {tenant.name} is also a key of tenant {owner}; remove it from one of them"
            )


def new_key() -> str:
    """A new API key."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest(key: bytes) -> bytes:
    """The SHA-256 of a key."""
    return hashlib.sha256(key).digest()


def hash_of(key: str) -> str:
    """The hash of a key, as `keys.yaml` has it."""
    return HASH_PREFIX + digest(key.encode()).hex()


def digest_of(key: ApiKey) -> bytes:
    """The SHA-256 that an entry of `keys.yaml` stands for."""
    return bytes.fromhex(key.hash.removeprefix(HASH_PREFIX))
