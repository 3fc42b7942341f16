"""Runs a deployment as `mmd up` does, for plain tests that ask it, kill its pods and look at them.

One thread runs all deployments. Each has two gateways, which share nothing but NATS, and each request goes to
the other gateway than the one before.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml

from mmd_api.contract.errors import PeerLostError
from mmd_api.contract.subjects import USERS, previous_of
from mmd_api.resource import MultimodalDeployment
from mmd_cli.client import media_part
from mmd_cli.local import up
from mmd_cli.local.forkserver import ForkServers
from mmd_cli.local.pods import NO_SECRETS, LocalPod, LocalSecrets
from mmd_cli.samples import Sample
from mmd_operator.resources.nats import PASSWORD_PREFIX
from mmd_workers.wire.server import START_SECONDS
from support.harness.waiting import DEADLINE_SECONDS, wait_until

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 480.0
STOP_SECONDS = 120.0
NATS_STARTS = 5


class Background:
    """A thread with an event loop that lasts as long as this process, for all its deployments.

    Their pods come from the same fork servers.
    """

    def __init__(self) -> None:
        self.servers = ForkServers()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="deployments", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


@cache
def background() -> Background:
    """The background of this process. Its thread, and everything that it started, end with the process."""
    return Background()


class Deployment:
    """Starts on entry, stops on exit; `lines` holds the latest log lines of every pod."""

    def __init__(self, file: Path, *, gateways: int = 2, secrets: LocalSecrets = NO_SECRETS) -> None:
        self.lines: deque[tuple[str, str]] = deque(maxlen=20_000)
        self._resource = _with_gateways(up.load(file), gateways)
        self._secrets = secrets
        self.engine = self._resource.spec.engine.type
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._serving: Future[None] | None = None
        self.local: up.LocalDeployment

    def __enter__(self) -> Deployment:
        self._serving = background().submit(self._serve())
        self._serving.add_done_callback(lambda _: self._ready.set())
        try:
            self._ready.wait()  # set at the latest after READY_SECONDS, with an error
        except BaseException:  # the test has timed out
            self._serving.cancel()
            with suppress(BaseException):
                self._serving.result(STOP_SECONDS)
            raise
        if self._serving.done():
            raise RuntimeError(
                f"the deployment did not start: {self._serving.exception()}; {self._last_lines()}"
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        assert self._serving is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        try:
            self._serving.result(STOP_SECONDS)
        except TimeoutError:
            raise AssertionError(f"the deployment did not stop; {self._last_lines()}") from None

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with up.running(
            self._resource,
            threads=1,
            log_line=lambda pod, line: self.lines.append((pod, line)),
            ready_seconds=READY_SECONDS,
            secrets=self._secrets,
            shared_servers=background().servers,
        ) as local:
            self.local = local
            self._turns = itertools.cycle(self.pods("gateway"))
            self._ready.set()
            await self._stop.wait()

    @property
    def gateway_url(self) -> str:
        """URL of the gateway whose turn it is."""
        return next(self._turns).http_url

    def http(self, timeout: float, **options: Any) -> httpx.Client:
        """A plain client. Each of its requests goes to the gateway whose turn it is."""

        def take_turns(request: httpx.Request) -> None:
            request.url = request.url.copy_with(netloc=httpx.URL(self.gateway_url).netloc)
            request.headers["host"] = request.url.netloc.decode()

        hooks = {"request": [take_turns]}
        limits = openai.DEFAULT_CONNECTION_LIMITS  # httpx's own limit is 100 requests at once
        return httpx.Client(
            base_url=self.gateway_url, timeout=timeout, event_hooks=hooks, limits=limits, **options
        )

    def client(self, timeout: float = 120, gateway: LocalPod | None = None) -> openai.OpenAI:
        """The official client, without its own retries.

        Without a `gateway`, each of its requests goes to the one whose turn it is.
        """
        return openai.OpenAI(
            base_url=f"{(gateway or self.pods('gateway')[0]).http_url}/v1",
            api_key="none",
            max_retries=0,
            timeout=timeout,
            http_client=None if gateway else self.http(timeout, follow_redirects=True),
        )

    def timeline(self, request_id: str) -> dict[str, Any]:
        """Timeline of a recent request, from the gateway that had it."""
        urls = [f"{pod.admin_url}/debug/requests/{request_id}" for pod in self.pods("gateway")]
        (response,) = [
            answer for url in urls if (answer := httpx.get(url, timeout=DEADLINE_SECONDS)).status_code == 200
        ]
        timeline: dict[str, Any] = response.json()
        return timeline

    def pods(self, component: str) -> list[LocalPod]:
        """Pods of one component."""
        return [pod for pod in self.local.pods if pod.component == component]

    def pid(self, pod: LocalPod) -> int | None:
        """Process id of a pod, if it runs now."""
        return self.local.supervisor.children[pod.name].pid

    def kill(self, pod: LocalPod) -> None:
        """Kill a pod with SIGKILL, as a crash would."""
        assert self.kill_if_running(pod)

    def kill_if_running(self, pod: LocalPod) -> bool:
        """Kill a pod as `kill` does; returns whether it ran."""
        pid = self.pid(pod)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def crash_gateway(self, gateway: LocalPod | None = None) -> None:
        """Kill a gateway, by default the next one.

        Waits until its successor knows as many ready pods as all gateways did.
        """
        gateway = gateway or next(self._turns)
        wait_until(lambda: bool(self.ready_pods()), "every gateway knows the same pods")
        before, ready = self.pid(gateway), self.ready_pods()
        self.kill(gateway)
        wait_until(lambda: self.pid(gateway) not in (None, before), f"{gateway.name} has started again")
        wait_until(lambda: self.ready_pods() == ready, "every gateway knows all pods")

    def ready_pods(self) -> dict[str, int] | None:
        """How many pods each gateway knows, by role; None while one does not answer, or they differ."""
        try:
            first, *others = (
                httpx.get(f"{pod.http_url}/ready", timeout=2).json()["ready_pods"]
                for pod in self.pods("gateway")
            )
        except (httpx.HTTPError, ValueError, KeyError):
            return None
        ready: dict[str, int] = first
        return ready if all(other == ready for other in others) else None

    def terminate(self, pod: LocalPod) -> None:
        """Send SIGTERM to a pod, as an eviction would."""
        pid = self.pid(pod)
        assert pid is not None
        os.kill(pid, signal.SIGTERM)

    @contextmanager
    def without_nats(self) -> Iterator[None]:
        """Kill the message server, and start it again after the block, with the same port and data."""
        self._on_the_thread_that_lasts(self.local.nats.kill)
        try:
            yield
        finally:
            self._on_the_thread_that_lasts(self._start_nats)

    def _start_nats(self) -> None:
        """Start the message server with repeated attempts, as `mmd up` does.

        On loopback, a client that tries to connect may hold the port for a moment.
        """
        for _ in range(NATS_STARTS - 1):
            with suppress(PeerLostError):
                self.local.nats.start()
                return
            time.sleep(1)
        self.local.nats.start()

    def restart_nats(self) -> None:
        """Kill the message server and start it again."""
        with self.without_nats():
            pass

    def password(self, user: str) -> str:
        """The password that the message server takes from a user."""
        return self.local.nats.environment[PASSWORD_PREFIX + user]

    def rotate_passwords(self) -> None:
        """Rotate passwords as on a cluster: the Secret changes, and the message server starts again.

        The pods' files show the change later; see `show_passwords`.
        """
        passwords = {user: f"p{secrets.token_hex(8)}" for user in USERS}
        passwords |= {previous_of(user): self.password(user) for user in USERS}
        with self.without_nats():
            self.local.nats.environment.update(
                {PASSWORD_PREFIX + user: password for user, password in passwords.items()}
            )

    def show_passwords(self) -> None:
        """Write the passwords that the message server takes to the pods' files."""
        for pod in self.local.pods:
            file = Path(pod.environment["MMD_NATS_LOGIN"]) / "password"
            changed = file.with_name("password.changed")
            changed.write_text(self.password(pod.environment["MMD_NATS_USERNAME"]))
            changed.replace(file)  # as in a mounted Secret: a pod sees one password or the other

    def _on_the_thread_that_lasts(self, work: Callable[[], object]) -> None:
        assert self._loop is not None
        done = Future[object]()

        def on_the_loop() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 -- raised again in the thread that waits
                done.set_exception(error)

        self._loop.call_soon_threadsafe(on_the_loop)
        done.result(NATS_STARTS * (START_SECONDS + 5))

    def _last_lines(self) -> str:
        return "\n".join(["it printed:", *(f"{pod} {line}" for pod, line in list(self.lines)[-40:])])

    def state(self, pod: LocalPod) -> dict[str, Any]:
        """The state that the pod reports."""
        answer: dict[str, Any] = httpx.get(f"{pod.http_url}/state", timeout=DEADLINE_SECONDS).json()
        return answer

    def is_ready(self, pod: LocalPod) -> bool:
        """Whether the pod is routable."""
        try:
            return httpx.get(f"{pod.http_url}/readyz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self, pod: LocalPod) -> None:
        """Wait until the pod is routable again."""
        wait_until(lambda: self.is_ready(pod), f"{pod.name} is ready")

    def logged(self, text: str) -> list[str]:
        """Log lines that contain a text."""
        return [f"{pod} {line}" for pod, line in list(self.lines) if text in line]


def _with_gateways(resource: MultimodalDeployment, count: int) -> MultimodalDeployment:
    gateway = resource.spec.gateway.model_copy(update={"replicas": count})
    return resource.model_copy(update={"spec": resource.spec.model_copy(update={"gateway": gateway})})


def content(sample: Sample) -> list[dict[str, Any]]:
    """A file and the question about it, as a message carries them."""
    return [
        media_part(sample.kind, sample.bytes, sample.mime),
        {"type": "text", "text": sample.question},
    ]


def write(path: Path, spec: dict[str, Any], name: str = "test") -> Path:
    """Write a MultimodalDeployment file."""
    resource = {
        "apiVersion": "serving.multimodal.dev/v1alpha1",
        "kind": "MultimodalDeployment",
        "metadata": {"name": name},
        "spec": spec,
    }
    path.write_text(yaml.safe_dump(resource))
    return path
