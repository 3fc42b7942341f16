"""`mmd create-key`: makes an API key, and the entry of `keys.yaml` with its hash.

The key is printed and not stored.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
import yaml

from mmd_api.tenants import InvalidKeysError, hash_of, new_key, parse_tenants
from mmd_cli.console import fail
from mmd_cli.errors import CommandError


def create_key(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant, as metrics and timelines show it.")],
    days: Annotated[
        int | None, typer.Option(min=1, max=36_500, help="Days until the key expires. Defaults to never.")
    ] = None,
) -> None:
    """Make an API key: its holder gets the key, from standard error, and keys.yaml the entry with its hash, from standard output."""
    key = new_key()
    entry = {"hash": hash_of(key)}
    if days is not None:
        expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
        entry["expires"] = expires.isoformat().replace("+00:00", "Z")
    text = yaml.safe_dump({"tenants": [{"name": tenant, "keys": [entry]}]}, sort_keys=False)
    try:
        parse_tenants(text)
    except InvalidKeysError as error:
        raise fail(
            CommandError(f"{tenant!r} cannot be the name of a tenant; use at most 63 of a-z, 0-9 and -")
        ) from error
    typer.echo(text, nl=False)
    typer.echo(f"API key of {tenant}, shown only now: {key}", err=True)
