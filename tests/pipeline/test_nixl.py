"""KV over NIXL between the pods of a whole deployment, and a decode pod that is killed while it has a stream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mmd_cli.samples import draw
from support.serving.backends import needs_nixl
from support.serving.held import scrape
from support.serving.local_deployment import Deployment, write

from .redundant import LONG_TOKENS, SPEC, busy, expected, load, stream_long, text_of

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("nixl"), pytest.mark.timeout(900)]
ONE = {"replicas": 1}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    needs_nixl()
    spec = SPEC | {
        "encoder": SPEC["encoder"] | ONE,
        "prefill": SPEC["prefill"] | ONE,
        "transfer": {"kv": {"backend": "Nixl"}},
    }
    with Deployment(write(tmp_path_factory.mktemp("nixl") / "nixl.yaml", spec, name="nixl")) as running:
        yield running


def test_requests_are_answered_while_kv_goes_over_nixl(deployment: Deployment) -> None:
    with load(deployment, 6, 1):
        pass
    (prefill,) = deployment.pods("prefill")
    assert scrape(prefill.http_url)["mmd_transfer_bytes_total"]["kv"] > 0


def test_a_stream_continues_when_its_decode_pod_is_killed(deployment: Deployment) -> None:
    sample = draw("image", 4001)
    stream = iter(stream_long(deployment, sample, temperature=0))
    text = "".join(text_of(next(stream)) for _ in range(20))
    killed = busy(deployment, "decode", "decode_running")
    deployment.kill(killed)
    assert text + "".join(text_of(chunk) for chunk in stream) == expected(sample, LONG_TOKENS)
    deployment.wait_ready(killed)
    with load(deployment, 6, 2):  # it is linked again, at the next epoch or as another incarnation
        pass
