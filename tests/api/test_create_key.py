"""`mmd create-key`: the key for its holder, and for keys.yaml an entry that lets it in."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import typer
from click.testing import Result
from typer.testing import CliRunner

from mmd_api.tenants import digest, digest_of, parse_tenants
from mmd_cli.commands.create_key import create_key


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(create_key)
    return CliRunner().invoke(app, list(arguments))


def test_stdout_is_a_keys_file_and_stderr_has_the_key() -> None:
    made = run("search")
    key = made.stderr.split()[-1]
    (tenant,) = parse_tenants(made.stdout)
    assert (tenant.name, [digest_of(one) for one in tenant.keys]) == ("search", [digest(key.encode())])
    assert tenant.keys[0].expires is None
    assert key.startswith("mmd-")
    assert key not in made.stdout
    assert run("search").stderr != made.stderr


def test_a_key_expires_after_as_many_days_as_it_is_given() -> None:
    made = run("search", "--days", "30")
    expires = parse_tenants(made.stdout)[0].keys[0].expires
    assert expires is not None
    assert abs(expires - (datetime.now(UTC) + timedelta(days=30))) < timedelta(minutes=5)


def test_a_name_that_no_tenant_can_have_makes_no_key() -> None:
    refused = run("Search Team")
    assert refused.exit_code == 1
    assert "mmd-" not in refused.output
    assert "use at most 63 of a-z, 0-9 and -" in refused.stderr
