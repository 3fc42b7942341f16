"""Tenants of gateways in tests: the file of their keys, and requests of a flood and of a quiet tenant beside a slow worker."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import datetime
from pathlib import Path

import yaml

from mmd_api.contract.load import PodLoad
from mmd_api.tenants import hash_of
from support.harness.waiting import until

from .scripted import ScriptedWorker, answer_well
from .spawned import BODY

AUTH = {"keysSecret": "demo-keys"}
SLOW = PodLoad(prefill_tokens_per_second=200.0)
"""A long prompt is more work than may be in a pod at a time, so a few of them are all that it gets."""
LONG = {**BODY, "messages": [{"role": "user", "content": "hello " * 100}], "max_tokens": 4}
SHORT = {**BODY, "max_tokens": 4}


def tenant(name: str, *keys: str, expires: datetime | None = None, **more) -> dict:
    until = {"expires": expires.isoformat()} if expires else {}
    return {"name": name, "keys": [{"hash": hash_of(key), **until} for key in keys], **more}


def write(file: Path, *tenants: dict) -> None:
    """Replace the file at once, as the kubelet does."""
    part = file.with_suffix(".part")
    part.write_text(yaml.safe_dump({"tenants": list(tenants)}))
    part.replace(file)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Pods:
    """One worker that answers when it is told to. `taken`: tenants of the requests that it has, in order."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.taken: list[str] = []
        self.changed = asyncio.Event()

    async def script(self, worker: ScriptedWorker, request) -> None:
        self.taken.append("flood" if len(request.token_ids) > self.short else "quiet")
        self.changed.set()
        await self.go.wait()
        await answer_well(worker, request)

    short = 60
    """Tokens that no prompt of the quiet tenant exceeds here."""

    async def until_taken(self, tenant_name: str, count: int) -> None:
        await until(lambda: Counter(self.taken)[tenant_name] >= count, changed=self.changed)
