"""`mmd status` asks each pod, and shows who may use the gateway."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from mmd_cli.local import state
from mmd_cli.program import build


@pytest.fixture
def deployment() -> Iterator[str]:
    """A note of a deployment with one gateway."""
    pods = [state.RunningPod("one-gateway-0", "gateway", "http://127.0.0.1:1")]
    name = f"one-{os.getpid()}"
    note = state.write(state.Running(name, os.getpid(), "http://127.0.0.1:2", "http://127.0.0.1:1", pods))
    yield name
    note.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("auth", "said"),
    [
        ({"enabled": False}, "API keys: none needed, so anyone who can reach the gateway can use it"),
        (
            {"enabled": True, "tenants": 2, "fault": ""},
            "API keys: needed; tenants that one-gateway-0 knows: 2\n",
        ),
        (
            {"enabled": True, "tenants": 0, "fault": "line 1: invalid YAML"},
            "its file of keys cannot be used: line 1: invalid YAML",
        ),
    ],
    ids=["open", "keys", "broken"],
)
def test_who_may_use_the_gateway_is_shown(
    deployment: str, monkeypatch: pytest.MonkeyPatch, auth: dict[str, Any], said: str
) -> None:
    answer = httpx.Response(200, json={"state": "ready", "auth": auth})
    monkeypatch.setattr(httpx, "get", lambda *_, **__: answer)
    shown = CliRunner().invoke(build().app, ["status", "--name", deployment])
    assert shown.exit_code == 0, shown.output
    assert said in shown.output


def test_an_unusable_certificate_and_an_absent_issuer_are_shown(
    deployment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth = {"enabled": True, "tenants": 2, "fault": "", "issuer_fault": "status 500"}
    state = {"state": "ready", "auth": auth, "tls": {"enabled": True, "fault": "tls.crt has expired"}}
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(200, json=state))
    shown = CliRunner().invoke(build().app, ["status", "--name", deployment])
    assert "tokens: one-gateway-0 cannot fetch the keys of their issuer: status 500" in shown.output
    assert "TLS: one-gateway-0 cannot use its certificate: tls.crt has expired" in shown.output


@pytest.mark.parametrize(("tier", "shown"), [(2, True), (0, False), (None, False)])
def test_media_in_lower_quality_because_of_load_are_shown(
    deployment: str, monkeypatch: pytest.MonkeyPatch, tier: int | None, shown: bool
) -> None:
    state = {"state": "ready", "media_tier": tier}
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(200, json=state))
    output = CliRunner().invoke(build().app, ["status", "--name", deployment]).output
    said = (
        "media: one-gateway-0 sends less of each, tier 2 of spec.gateway.media.underLoad; if it stays so, add"
    )
    assert (said in " ".join(output.split())) is shown
