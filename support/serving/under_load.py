"""Load and faults for tests that watch a deployment under both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from mmd_cli.local import supervisor
from mmd_cli.samples import Sample, as_another_file, draw
from support.harness.processes import frozen
from support.serving.local_deployment import Deployment, content

AT_ONCE = 400
VIDEO = draw("video", 90_000)


def another_video() -> Sample:
    """A video that nobody has encoded before."""
    return replace(VIDEO, bytes=as_another_file(VIDEO.bytes, time.time_ns()))


def about_videos(count: int) -> list[dict[str, Any]]:
    """One question about several videos."""
    videos = [another_video() for _ in range(count)]
    return [content(video)[0] for video in videos] + content(VIDEO)[1:]


@contextmanager
def hung(pid: int | None) -> Iterator[None]:
    """Freeze a worker, whose liveness probe lets it hang for as long as the test takes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(supervisor, "LIVENESS_FAILURES", math.inf)
        with frozen(pid):
            yield


@contextmanager
def clients(deployment: Deployment) -> Iterator[Callable[..., Future[Any]]]:
    """Many clients at once. The block ends when all have their answer."""
    client = deployment.client(timeout=300)
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 24}

    def ask(what: list[dict[str, Any]] | str, options: dict[str, Any]) -> Any:
        messages: Any = [{"role": "user", "content": what}]
        return client.chat.completions.create(model="builtin/demo", messages=messages, **defaults | options)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield lambda what, **options: threads.submit(ask, what, options)
