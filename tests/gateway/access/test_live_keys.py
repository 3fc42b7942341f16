"""How tenants and keys follow their file: what a gateway takes from it, when, and what it remembers of those that were removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmd_api.contract.errors import (
    InvalidApiKeyError,
    KeysUnavailableError,
    RateLimitError,
    UnknownTenantError,
)
from mmd_api.tenants import hash_of, new_key, parse_tenants
from mmd_workers.gateway.access import keys as access_module
from mmd_workers.gateway.access.keys import Access, KnownTenant, LiveKeys
from mmd_workers.gateway.placement.timeline import Timeline, Timelines
from mmd_workers.observe.metrics import Metrics

KEY, OTHER = new_key(), new_key()
RESTRICTED = f"""tenants:
- name: search
  keys: [{{hash: {hash_of(KEY)}}}]
  limits: {{requestsPerMinute: 1}}
"""
ONCE_MORE = RESTRICTED.replace("requestsPerMinute: 1", "requestsPerMinute: 2")


@pytest.fixture
def access() -> Access:
    return Access(Metrics(("gateway",)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


@pytest.fixture
def keys(access: Access, file: Path) -> LiveKeys:
    return LiveKeys(file, access, Metrics(("gateway",)))


def found(access: Access, key: str = KEY) -> KnownTenant:
    return access.authenticate([(b"x-api-key", key.encode())])


async def test_the_first_file_is_in_force_at_the_first_look(
    access: Access, file: Path, keys: LiveKeys
) -> None:
    file.write_text(RESTRICTED)
    await keys.check()
    assert found(access).name == "search"


async def test_a_file_written_in_place_is_taken_once_it_is_complete(
    access: Access, file: Path, keys: LiveKeys
) -> None:
    file.write_text(RESTRICTED)
    await keys.check()
    for part in ("", RESTRICTED.partition("  limits")[0], ONCE_MORE):
        file.write_text(part)
        await keys.check()
        assert found(access).tenant.limits.requests_per_minute == 1
        assert access.fault == ""
    await keys.check()
    assert found(access).tenant.limits.requests_per_minute == 2


async def test_an_empty_file_is_rejected_and_a_restored_one_read_twice(
    access: Access, file: Path, keys: LiveKeys
) -> None:
    file.write_text(RESTRICTED)
    await keys.check()
    file.write_text("")
    await keys.check()
    await keys.check()
    assert "not a mapping" in access.fault
    file.unlink()
    await keys.check()
    assert access.fault == "No such file or directory"
    file.write_text(ONCE_MORE)
    await keys.check()
    assert found(access).tenant.limits.requests_per_minute == 1
    await keys.check()
    assert (found(access).tenant.limits.requests_per_minute, access.fault) == (2, "")


BROKEN = {
    "no integer": '!!int ""',
    "no number": '!!float ""',
    "no truth value": f"!!bool {OTHER}",
    "deep": "[" * 5000,
    "half a character": '"\\ud800"',
}


@pytest.mark.parametrize("value", BROKEN.values(), ids=list(BROKEN))
async def test_no_content_of_the_file_ends_the_gateway(
    value: str, access: Access, file: Path, keys: LiveKeys
) -> None:
    file.write_text(value)
    await keys.check()
    assert access.fault
    assert OTHER not in access.fault
    with pytest.raises(KeysUnavailableError):
        found(access)


async def test_a_bug_in_reading_the_file_is_a_rejection_without_its_words(
    access: Access, file: Path, keys: LiveKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(text: str) -> None:
        raise KeyError(text)

    monkeypatch.setattr(access_module, "parse_tenants", fail)
    file.write_text(RESTRICTED)
    await keys.check()
    assert access.fault == "cannot be read (KeyError); check it"


def test_a_tenant_removed_and_added_again_keeps_its_usage(
    access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(access_module.time, "monotonic", lambda: now)
    tenants = parse_tenants(RESTRICTED)
    access.take(tenants)
    with access.admitted(found(access)):
        access.take(())
        with pytest.raises(InvalidApiKeyError):
            found(access)
    access.take(())
    access.take(tenants)
    with pytest.raises(RateLimitError), access.admitted(found(access)):
        pass
    access.take(())
    now += 62
    access.take(())
    assert not access._removed, "nobody is remembered whose requests no longer count"
    access.take(tenants)
    with access.admitted(found(access)):
        pass


def test_a_missing_default_tenant_is_logged_and_mentioned_in_the_refusal(
    access: Access, caplog: pytest.LogCaptureFixture
) -> None:
    assert not access.lacks("guests"), "there is no file yet, which is reported as such"
    access.take(parse_tenants(RESTRICTED))
    assert (access.lacks("search"), access.lacks("guests")) == (False, True)
    assert access.named("stranger", "search").name == "search"
    with pytest.raises(UnknownTenantError) as refused:
        access.named("stranger", None)
    assert "defaultTenant" not in str(refused.value)
    assert not caplog.records
    with pytest.raises(UnknownTenantError, match="lacks that of spec"):
        access.named("stranger", "guests")
    assert "keys.yaml has no tenant guests" in caplog.text
    assert "stranger" not in caplog.text


def test_running_requests_are_kept_and_the_oldest_that_has_ended_makes_room() -> None:
    timelines = Timelines(capacity=2)
    kept = [Timeline(f"request-{number}", arrived=float(number)) for number in range(4)]
    timelines.open(kept[0])
    for timeline in kept[1:]:
        timelines.open(timeline)
        timeline.finished = 10.0
    shown = [summary["request_id"] for summary in timelines.newest(9)]
    assert shown == ["request-3", "request-0"]
    for number in range(3):
        timelines.open(Timeline(f"running-{number}", arrived=20.0))
    assert timelines.get("request-0") is kept[0]
    assert len(timelines.newest(9)) == 4
