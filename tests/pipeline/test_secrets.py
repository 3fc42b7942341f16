"""A deployment whose server, passwords and workers fail: no log, error, state, timeline, metric or page contains a secret."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from mmd_cli.local.pods import LocalPod
from mmd_cli.local.supervisor import Supervisor
from mmd_cli.program import build
from mmd_cli.samples import draw
from support.harness.promises import promise
from support.harness.waiting import wait_until
from support.serving.local_deployment import Deployment, content, write
from support.serving.under_load import hung

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("secrets"), pytest.mark.timeout(600)]

_seeds = itertools.count(70_000)
HUB_TOKEN = "hf_thisIsTheTokenOfTheHub"
CPU = {"replicas": 1, "gpus": 0}
SPEC = {
    "model": {"id": "builtin/demo", "dtype": "Float32"},
    "encoder": {**CPU, "cacheMebibytes": 16},
    "prefill": {**CPU, "kvCacheMebibytes": 64},
    "decode": {
        **CPU,
        "kvCacheMebibytes": 64,
        "template": {"env": [{"name": "HF_TOKEN", "value": HUB_TOKEN}]},
    },
    "transfer": {"kv": {"backend": "Gloo"}},
    "gateway": {"requestTimeoutSeconds": 15, "maxConcurrentRequests": 4},  # of each of the two
    "observability": {"logLevel": "Debug"},
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(
        write(tmp_path_factory.mktemp("secrets") / "secrets.yaml", SPEC, name="secrets")
    ) as running:
        yield running


def ask(deployment: Deployment, tokens: int = 8) -> str:
    """Status, headers and body of an answer; "" where the connection broke."""
    body = {
        "model": "builtin/demo",
        "messages": [{"role": "user", "content": "Tell a story."}],
        "max_tokens": tokens,
    }
    with suppress(httpx.HTTPError):
        answer = httpx.post(
            f"{deployment.gateway_url}/v1/chat/completions",
            json={**body, "ignore_eos": True},
            timeout=60,
        )
        return f"{answer.status_code} {dict(answer.headers)} {answer.text}"
    return ""


def ask_about_an_image(deployment: Deployment) -> str:
    """As `ask`, with an image that nobody has encoded before."""
    sample = draw("image", next(_seeds))
    body = {
        "model": "builtin/demo",
        "messages": [{"role": "user", "content": content(sample)}],
        "max_tokens": 8,
    }
    with suppress(httpx.HTTPError):
        answer = httpx.post(f"{deployment.gateway_url}/v1/chat/completions", json=body, timeout=60)
        return f"{answer.status_code} {dict(answer.headers)} {answer.text}"
    return ""


def with_a_wrong_password(deployment: Deployment, component: str) -> None:
    """Another pod of a component, which the server refuses: it ends, and says why."""
    pod = deployment.pods(component)[0]
    stranger = LocalPod(
        name=f"{component}-stranger",
        component=component,
        command=pod.command,
        environment={
            **pod.environment,
            "MMD_NATS_PASSWORD": "wrongPasswordOfAStranger",
            "MMD_NATS_LOGIN": "",  # the file has the right one
            "MMD_HTTP_PORT": "0",
            "MMD_ADMIN_PORT": "0",
        },
        http_port=0,
        grace_seconds=1.0,
    )
    supervisor = deployment.local.supervisor
    deployment._loop.call_soon_threadsafe(Supervisor.start, supervisor, stranger)
    try:
        wait_until(
            lambda: any(
                pod == stranger.name and "cannot serve" in line for pod, line in list(deployment.lines)
            ),
            "the server refused the stranger",
        )
    finally:
        stopped = threading.Event()

        async def stop() -> None:
            await supervisor.stop([stranger.name])
            stopped.set()

        deployment._loop.call_soon_threadsafe(lambda: deployment._loop.create_task(stop()))
        assert stopped.wait(30)


def pages(deployment: Deployment, folder: Path) -> dict[str, str]:
    """Everything that pods and commands show, by where it is shown."""
    found: dict[str, str] = {}
    for pod in deployment.local.pods:
        paths = ["/livez", "/readyz", "/metrics", "/state"]
        if pod.component == "gateway":
            paths += ["/demand", "/debug/state", "/debug/requests?limit=512", "/debug/targets"]
            for path in ("/", "/v1/models", "/v1/models/builtin/demo", "/ready", "/readyz", "/health"):
                found[f"clients' {path} at {pod.name}"] = httpx.get(pod.http_url + path, timeout=10).text
        for path in paths:
            found[f"{pod.name}{path}"] = httpx.get(pod.admin_url + path, timeout=10).text
    found["log of nats-server"] = "\n".join(deployment.local.nats.printed)
    runner = CliRunner()
    for gateway in deployment.pods("gateway"):
        for one in json.loads(found[f"{gateway.name}/debug/requests?limit=512"])["requests"]:
            said = runner.invoke(build().app, ["trace", one["request_id"], "--name", "secrets"])
            assert said.exit_code == 0, said.output
            found[f"mmd trace {one['request_id']}"] = said.output
    report = folder / "report.html"
    for command in (
        ["status", "--name", "secrets"],
        ["top", "--name", "secrets", "--once"],
        ["report", "--name", "secrets", "--output", str(report)],
    ):
        said = runner.invoke(build().app, command)
        assert said.exit_code == 0, (command, said.output)
        found[f"mmd {command[0]}"] = said.output
    found["report page"] = report.read_text()
    return found


def test_no_secret_appears_in_anything_that_a_deployment_with_faults_shows(
    deployment: Deployment, tmp_path: Path
) -> None:
    answers: list[str] = []
    with ThreadPoolExecutor(24) as threads:
        (prefill,), (decode,), (encoder,) = map(deployment.pods, ("prefill", "decode", "encoder"))
        answers.append(ask_about_an_image(deployment))
        assert answers[0].startswith("200")
        with hung(deployment.pid(encoder)):
            answers.append(ask_about_an_image(deployment))  # until its deadline
        deployment.kill(encoder)
        stories = [threads.submit(ask, deployment, 400) for _ in range(24)]  # three times the limit
        deployment.kill(decode)
        with deployment.without_nats():
            answers += [threads.submit(ask, deployment).result()]
        deployment.kill(prefill)
        with_a_wrong_password(deployment, "gateway")
        answers += [story.result() for story in stories]
    for pod in (prefill, decode, encoder):
        deployment.wait_ready(pod)
    wait_until(lambda: ask(deployment).startswith("200"), "the deployment serves again")
    with hung(deployment.pid(prefill)):
        answers.append(ask(deployment))  # until its deadline
    answers.append(ask_about_an_image(deployment))
    assert any(answer.startswith("429") for answer in answers), "nothing was refused for overload"
    assert any(answer.startswith("50") for answer in answers), "no fault reached a client"

    shown = pages(deployment, tmp_path)
    shown |= {f"answer {number}": answer for number, answer in enumerate(answers)}
    shown |= {f"log line {number}": f"{pod} {line}" for number, (pod, line) in enumerate(deployment.lines)}
    assert "lost" in json.dumps(shown), "no timeline reports a lost worker"
    assert "authentication error" in shown["log of nats-server"].lower(), "nats-server logged no stranger"
    secrets: dict[str, Any] = {
        f"{pod.name} {name}": value
        for pod in deployment.local.pods
        for name, value in pod.environment.items()
        if name in ("MMD_NATS_PASSWORD", "HF_TOKEN")
    }
    assert len(secrets) == len(deployment.local.pods) + 1
    secrets["wrong password"] = "wrongPasswordOfAStranger"
    leaks = [
        f"{where} shows {name}"
        for where, text in shown.items()
        for name, value in secrets.items()
        if value in text
    ]
    promise(not leaks, f"secrets are shown: {leaks}")
