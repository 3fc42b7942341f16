"""The file of tenants and hashes of API keys: what is valid, and that no message quotes what may be a key."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from mmd_api.tenants import (
    MAX_FILE_BYTES,
    InvalidKeysError,
    digest,
    digest_of,
    hash_of,
    new_key,
    parse_tenants,
)

KEY = "mmd-this-is-a-key-that-somebody-put-where-its-hash-belongs"
HASH = hash_of("one")
OTHER = hash_of("other")


def test_a_tenant_has_keys_models_and_limits() -> None:
    (tenant,) = parse_tenants(
        f"""
tenants:
- name: search
  keys:
  - hash: {HASH}
    expires: 2027-06-30T00:00:00Z
  - hash: {OTHER}
  models: [demo]
  priority: High
  limits: {{concurrentRequests: 8, requestsPerMinute: 120, workSecondsPerMinute: 30, tokensPerDay: 5000000}}
"""
    )
    assert (tenant.name, tenant.models) == ("search", ["demo"])
    assert [key.expires for key in tenant.keys] == [datetime(2027, 6, 30, tzinfo=UTC), None]
    assert [digest_of(key) for key in tenant.keys] == [digest(b"one"), digest(b"other")]
    assert (tenant.limits.concurrent_requests, tenant.limits.requests_per_minute) == (8, 120)
    assert (tenant.limits.work_seconds_per_minute, tenant.limits.tokens_per_day) == (30, 5_000_000)
    assert tenant.priority == "High"


def test_a_tenant_without_a_priority_has_that_of_most() -> None:
    (tenant,) = parse_tenants("tenants:\n- name: search\n  keys: []")
    assert tenant.priority == "Normal"


def test_an_empty_list_is_valid_and_lets_nobody_in() -> None:
    assert parse_tenants("tenants: []") == ()


def test_keys_are_long_and_all_different() -> None:
    keys = {new_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert all(re.fullmatch(r"mmd-[A-Za-z0-9_-]{43}", key) for key in keys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a mapping"),
        ("tenants:", "tenants: the value is not a list"),
        (f"tenants:\n- name: a\n  keys: [{{hash: {KEY}}}]", r"tenants\[0\].keys\[0\].hash"),
        (f"tenants:\n- name: a\n  keys: [{KEY}]", r"tenants\[0\].keys\[0\]: the value is not a mapping"),
        (f"tenants:\n- name: a\n  {KEY}: 1\n  keys: []", r"tenants\[0\]: has an unknown field"),
        (f"tenants:\n- name: {KEY.upper()}\n  keys: []", r"tenants\[0\].name: the value has an invalid"),
        (f"tenants: [{KEY}", "line 1: invalid YAML"),
        (f"!{KEY} x", "line 1: invalid YAML"),
        (f"? [1, 2]\n: {KEY}", "line 1: invalid YAML"),
        (f"a: &{KEY} 1\nb: *{KEY}", "line 2: invalid YAML, a key twice in a mapping, or an alias"),
        (f"{KEY}: 1\n{KEY}: 2", "line 2: invalid YAML, a key twice"),
        (f"{KEY}: \0", "not readable as YAML"),
        ("[" * 5000, "nested too deeply"),
        ("tenants: " + "[" * 250 + "]" * 250, "nested too deeply"),
        (f'tenants: ["{KEY}\\ud800"]', "not valid Unicode"),
        ('!!int ""', "not readable as YAML"),
        ('!!float ""', "not readable as YAML"),
        (f"!!bool {KEY}", "not readable as YAML"),
        (
            f"tenants:\n- name: a\n  keys: [{{hash: {HASH}, expires: }}]",
            r"keys\[0\].expires: has no value",
        ),
        (
            "tenants:\n- name: a\n  keys: []\n  models:",
            r"tenants\[0\].models: has no value; set one",
        ),
        ("tenants:\n- name: a\n  keys: []\n  limits:", r"tenants\[0\].limits: the value is not a mapping"),
        (
            "tenants:\n- name: a\n  keys: []\n  limits: {concurrentRequests: , requestsPerMinute: 1}",
            "limits.concurrentRequests: has no value",
        ),
        (f"tenants:\n- name: a\n  keys: []\n  priority: {KEY}", r"tenants\[0\].priority: "),
        ("tenants:\n- name: a\n  keys: []\n  limits: {tokensPerDay: 0}", "limits.tokensPerDay: "),
        (
            "tenants:\n- name: a\n  keys: []\n  limits: {workSecondsPerMinute: }",
            "limits.workSecondsPerMinute: has no value",
        ),
        (
            "tenants:\n- name: a\n  keys: []\n  limits: {requestsPerMinute: null}",
            "limits.requestsPerMinute: has no value",
        ),
        (
            f"tenants:\n- name: a\n  keys: [{{hash: {HASH}}}, {{hash: {OTHER}}}, {{hash: {HASH}}}]",
            r"keys\[0\] and keys\[2\] of tenant a are the same",
        ),
        (f"tenants:\n- name: a\n  keys: [{{hash: {HASH}, expires: 2027-06-30}}]", "time with a time zone"),
        (
            f"tenants:\n- name: a\n  keys: [{{hash: {HASH}, expires: 2027-06-30T00:00:00}}]",
            "time with a time zone",
        ),
        ("tenants:\n- name: a\n  keys: []\n- name: a\n  keys: []", "tenant a is listed twice"),
        (
            f"tenants:\n- name: a\n  keys: [{{hash: {HASH}}}]\n- name: b\n  keys: [{{hash: {HASH}}}]",
            r"keys\[0\] of tenant b is also a key of tenant a",
        ),
        ("tenants:\n- name: a\n  keys: []\n  limits: {requestsPerMinute: 0}", "too small; set at least 1"),
        ("tenants:\n- name: a\n  keys: []\n  models: []", r"tenants\[0\].models"),
        ("#" * (MAX_FILE_BYTES + 1), "larger than 256 KiB"),
    ],
)
def test_what_is_wrong_is_named_and_never_quoted(text: str, said: str) -> None:
    with pytest.raises(InvalidKeysError, match=said) as error:
        parse_tenants(text)
    assert KEY not in str(error.value)
    assert KEY.upper() not in str(error.value)
    assert HASH not in str(error.value)
