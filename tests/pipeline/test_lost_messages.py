"""One message of each kind is lost, or the message server is killed the moment it is sent: every request still ends as it
should, and within seconds no pod holds anything for it.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import select
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from mmd_api.contract.pools import MODALITIES
from mmd_cli.client import media_part
from mmd_cli.local import up
from mmd_cli.samples import draw
from mmd_workers.wire import messages
from mmd_workers.wire.server import NatsServer
from support.harness.promises import promise
from support.harness.waiting import wait_until
from support.serving.held import held, load_of, workers
from support.serving.local_deployment import Deployment, write

from . import redundant
from .lossy_proxy import MESSAGES, LossyProxy, Match

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("lost"), pytest.mark.timeout(600)]

FREE_SECONDS = 20.0  # after the last answer: a report, an engine step, a crowded machine
POOL = {"replicas": 1, "gpus": 0}
SPEC = redundant.SPEC | {
    "encoder": {**POOL, "cacheMebibytes": 16},
    "prefill": {**POOL, "kvCacheMebibytes": 64, "featureBudgetMebibytes": 64, "chunkTokens": 64},
    "decode": {**POOL, "kvCacheMebibytes": 64, "maxSequences": 32},
    "gateway": {"requestTimeoutSeconds": 120},
}
_seeds = itertools.count(40_000)


class BehindProxy(NatsServer):
    """A server whose clients come through the proxy."""

    proxy: LossyProxy

    @property
    def url(self) -> str:
        if not hasattr(self, "proxy"):
            self.proxy = LossyProxy(super().url)
        return self.proxy.url


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One worker of each kind: nobody else can step in for it. The two gateways read answers from each other."""
    original = up._nats

    def behind_proxy(*arguments: Any) -> NatsServer:
        server = original(*arguments)
        server.__class__ = BehindProxy
        return server

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(up, "_nats", behind_proxy)
        file = write(tmp_path_factory.mktemp("lost") / "lost.yaml", SPEC, name="lost")
        with Deployment(file) as running:
            yield running


@pytest.fixture
def proxy(deployment: Deployment) -> Iterator[LossyProxy]:
    for pod in workers(deployment):
        deployment.wait_ready(pod)
    server = deployment.local.nats
    assert isinstance(server, BehindProxy)
    yield server.proxy
    server.proxy.disarm()


# --- what makes pods send it ---------------------------------------------------------------------------------------


def ask_new_questions(deployment: Deployment) -> None:
    """A picture, a video and a sound that nobody has seen, side by side."""
    asked = [draw(kind, next(_seeds)) for kind in MODALITIES]
    redundant.assert_answered(deployment, *asked)


def long_question() -> dict[str, Any]:
    """The body of a request whose prompt takes many steps of prefill."""
    text = f"{next(_seeds)} " + "Tell me about the red circle and the blue square. " * 60
    return {
        "model": redundant.MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1500,
        "ignore_eos": True,
    }


def leave_in_the_middle(deployment: Deployment) -> None:
    """The client leaves during the prefill, or soon after."""
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(
            f"{deployment.gateway_url}/v1/chat/completions",
            json=long_question(),
            timeout=httpx.Timeout(30, read=0.5),
        )


def leave_while_blocks_are_reserved(deployment: Deployment) -> None:
    """The client leaves while the decode worker has reserved blocks and stands still: the prefill worker gives them back."""
    (prefill,), (decode,) = deployment.pods("prefill"), deployment.pods("decode")
    gateway = httpx.URL(deployment.gateway_url)
    connection = http.client.HTTPConnection(gateway.host, gateway.port or 80, timeout=30)
    with contextlib.closing(connection):
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(long_question()),
            {"content-type": "application/json"},
        )
        wait_until(
            lambda: (
                load_of(deployment, decode).get("kv_blocks_reserved")
                or select.select([connection.sock], [], [], 0)[0]
            ),
            "blocks are reserved, or the answer is there",
            pause_seconds=0.005,
        )
        redundant.send(deployment, decode, signal.SIGSTOP)
    try:
        wait_until(
            lambda: not load_of(deployment, prefill).get("prefill_waiting_requests"),
            "the prefill worker has forgotten the request",
        )
    finally:
        redundant.send(deployment, decode, signal.SIGCONT)


def ask_about_a_broken_picture(deployment: Deployment) -> None:
    """Its header is good, so that only an encoder finds the end missing."""
    picture = draw("image", next(_seeds), "image/png")
    broken = media_part("image", picture.bytes[:-40], picture.mime)
    parts: Any = [broken, {"type": "text", "text": "What is it?"}]
    with pytest.raises(openai.BadRequestError):
        deployment.client().chat.completions.create(
            model=redundant.MODEL, messages=[{"role": "user", "content": parts}], max_tokens=4
        )


def ask_again_after_a_restart(deployment: Deployment) -> None:
    """The restarted prefill worker has lost the feature that the encoder has kept."""
    (prefill,) = deployment.pods("prefill")
    sample = draw("image", next(_seeds))
    redundant.assert_answered(deployment, sample)
    deployment.kill(prefill)
    wait_until(lambda: not deployment.is_ready(prefill), "the prefill worker is gone")
    deployment.wait_ready(prefill)
    redundant.assert_answered(deployment, sample)


def start_the_gateway_again(deployment: Deployment) -> None:
    """The next one has missed what the prefill worker has reported of its prefix cache."""
    ask_new_questions(deployment)
    deployment.crash_gateway()


def ask_again_at_the_other_gateway(deployment: Deployment) -> None:
    """It is told which gateway has the answer, and reads it there, or makes it once more."""
    seed = next(_seeds)
    answers = [
        deployment.client(gateway=gateway).chat.completions.create(
            model=redundant.MODEL,
            messages=[{"role": "user", "content": f"What is {seed}?"}],
            max_tokens=redundant.TOKENS,
            temperature=0,
            extra_headers={"idempotency-key": f"key-{seed}"},
        )
        for gateway in deployment.pods("gateway")
    ]
    first, again = (answer.choices[0].message.content for answer in answers)
    promise(first == again, f"{again!r} is not the retained answer {first!r}")


PROVOKED_BY: dict[type, Callable[[Deployment], None]] = {
    messages.prefill.Cancel: leave_in_the_middle,
    messages.decode.KvRelease: leave_while_blocks_are_reserved,
    messages.gateway.RequestFailed: ask_about_a_broken_picture,
    messages.prefill.EncodeFailed: ask_about_a_broken_picture,
    messages.encoder.EncodeTaken: ask_again_after_a_restart,
    messages.every_pod.CacheWanted: start_the_gateway_again,
    messages.gateway.AnswerClaim: ask_again_at_the_other_gateway,
    messages.gateway.AnswerClaimed: ask_again_at_the_other_gateway,
    messages.gateway.AnswerRead: ask_again_at_the_other_gateway,
    messages.gateway.AnswerPiece: ask_again_at_the_other_gateway,
}


def provoke(deployment: Deployment, proxy: LossyProxy, kind: type) -> None:
    """Until a message of this kind has come by: some depend on the moment."""
    while not proxy.struck.is_set():
        PROVOKED_BY.get(kind, ask_new_questions)(deployment)
        proxy.struck.wait(2.0)


def is_a(kind: type) -> Match:
    return lambda found, _: found is kind


def ends_a_sequence(found: type, fields: dict[str, Any]) -> bool:
    return found is messages.gateway.TokenBatch and any(item["finish_reason"] for item in fields["items"])


BETWEEN_ENCODERS = (messages.encoder.FeaturesGiven, messages.encoder.FeaturesWanted)
"""Of which there is one here; their loss is in `tests/roles/test_cache_handover.py`."""
CASES = [
    pytest.param(kind, is_a(kind), id=kind.__name__) for kind in MESSAGES if kind not in BETWEEN_ENCODERS
]
CASES.append(pytest.param(messages.gateway.TokenBatch, ends_a_sequence, id="TokenBatch-last"))
WORST = (
    messages.prefill.GenerateRequest,
    messages.encoder.EncodeJob,
    messages.prefill.EmbeddingChunk,
    messages.prefill.EncodeFailed,
    messages.decode.KvChunk,
    messages.decode.KvCommit,
    messages.decode.KvCommitted,
    messages.prefill.Cancel,
    messages.gateway.RequestFailed,
    messages.gateway.SequenceReport,
)
WORST_CASES = [pytest.param(kind, is_a(kind), id=kind.__name__) for kind in WORST]
WORST_CASES.append(pytest.param(messages.gateway.TokenBatch, ends_a_sequence, id="TokenBatch-last"))


@pytest.mark.parametrize(("kind", "match"), CASES)
def test_a_lost_message_costs_no_request_and_nothing_stays_held(
    deployment: Deployment, proxy: LossyProxy, kind: type, match: Match
) -> None:
    proxy.arm(match)
    provoke(deployment, proxy, kind)
    wait_until(
        lambda: not held(deployment), lambda: f"nothing held: {held(deployment)}", seconds=FREE_SECONDS
    )


@pytest.mark.parametrize(("kind", "match"), WORST_CASES)
def test_a_message_server_killed_at_any_message_costs_no_request(
    deployment: Deployment, proxy: LossyProxy, kind: type, match: Match
) -> None:
    server = deployment.local.nats
    pid = server.pid
    assert pid is not None
    proxy.arm(match, lambda: os.kill(pid, signal.SIGKILL))
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(provoke, deployment, proxy, kind)
        assert proxy.struck.wait(150), f"no {kind.__name__} was sent"
        deployment.restart_nats()
        asking.result()
    wait_until(
        lambda: not held(deployment), lambda: f"nothing held: {held(deployment)}", seconds=FREE_SECONDS
    )
