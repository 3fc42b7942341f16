"""Random requests of every operation get answers as the gateway's OpenAPI document has them, and leave nothing behind.

`tests/pipeline/test_fuzz.py` sends many more to whole deployments.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from support.serving.asking import HANG_SECONDS
from support.serving.fuzzing import BASES, MODEL, TAKEN, TENANTS, fuzz
from tests.gateway.running import Launch, assert_nothing_is_left
from tests.gateway.tenancy import AUTH, write

REQUESTS = 1_000
DIFFERENT = 15  # bodies of each operation, valid and invalid; the other requests have them with changes


@pytest.mark.timeout(600)
async def test_random_requests_get_documented_answers_and_leave_nothing(
    launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys.yaml"
    write(keys, *TENANTS)
    gateway = await launch(auth=AUTH, keys_file=str(keys), files={}, with_decoders=True)
    await gateway.worker("the red circle and the blue square", encodes_small_media=True)
    with httpx.Client(base_url=gateway.url, timeout=HANG_SECONDS) as client:
        report = await asyncio.to_thread(fuzz, client, REQUESTS, 7, DIFFERENT)
    assert report.failures == []
    assert report.requests >= REQUESTS
    operations = {line.rpartition(" ")[0] for line in report.statuses}
    document = (await gateway.http.get("/openapi.json", headers=TAKEN[0])).json()
    assert operations >= {
        f"{method.upper()} {path}" for path, one in document["paths"].items() for method in one
    }
    assert {"200", "400", "401", "404", "405", "415", "429"} <= {
        line.rpartition(" ")[2] for line in report.statuses
    }
    await assert_nothing_is_left(gateway)
    for path, body in BASES.items():
        more = {"max_tokens": 4} if path in ("/v1/chat/completions", "/v1/messages") else {}
        answer = await gateway.http.post(path, json={"model": MODEL, **body, **more}, headers=TAKEN[0])
        assert answer.status_code == 200, answer.text
    assert [record for record in caplog.records if record.exc_info] == []
