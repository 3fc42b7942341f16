"""The storm: thousands of real requests while pools grow and shrink, a revision rolls out, pods are deleted and killed and the operator dies.

Every answer must be that of `generate` of the whole model; the report counts what was lost, answered twice or wrong.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from shell import FailedError, beside, until
from steps import console

HERE = Path(__file__).parent
REPOSITORY = HERE.parent
sys.path += [
    str(REPOSITORY / "bench"),
    str(REPOSITORY / "tests" / "pipeline"),
    str(REPOSITORY / "tests" / "model"),
    str(REPOSITORY / "tests"),
]

import report  # noqa: E402  bench's
import storm_client  # noqa: E402

from mmd_workers.local.samples import draw  # noqa: E402

NAME = "storm"
MANIFEST = HERE / "storm.yaml"
LARGEST = {"encoder": 3, "prefill": 2, "decode": 2}
POOLS = tuple(LARGEST)
REQUESTS = 2000
PAUSE_SECONDS = 10.0
LATER_PAUSE_SECONDS = 20.0
"""Between the troubles that are drawn, when each kind has come once."""
WHOLE_TRIES = 6  # of two seconds: then the next trouble comes upon what is not whole again
DEADLINE_SECONDS = 1500.0
SETTLE_SECONDS = 240.0
COLOURS = {"encoder": "#d95f02", "prefill": "#1b9e77", "decode": "#7570b3"}
Kubectl = Callable[..., str]


@dataclass
class Watch:
    """Replicas asked for and ready by pool, over all revisions, every few seconds.

    `largest`: the most replicas that one StatefulSet of the pool was asked to have, so that the old beside the new of a
    rollout does not count as growth.
    """

    kubectl: Kubectl
    began: float = field(default_factory=time.time)
    rows: list[dict[str, Any]] = field(default_factory=list)
    moments: list[tuple[float, str]] = field(default_factory=list)
    largest: Counter[str] = field(default_factory=Counter)

    def look(self) -> dict[str, list[int]]:
        sets = json.loads(
            self.kubectl(
                "get", "statefulsets", "--output=json", f"--selector=serving.multimodal.dev/deployment={NAME}"
            )
        )["items"]
        sizes = {pool: [0, 0] for pool in POOLS}
        for found in sets:
            pool = found["metadata"]["labels"]["app.kubernetes.io/component"]
            if pool in sizes:
                wanted = found["spec"]["replicas"]
                self.largest[pool] = max(self.largest[pool], wanted)
                sizes[pool][0] += wanted
                sizes[pool][1] += found.get("status", {}).get("readyReplicas", 0)
        self.rows.append({"seconds": round(time.time() - self.began, 1)} | sizes)
        return sizes

    def note(self, words: str) -> None:
        self.moments.append((round(time.time() - self.began, 1), words))
        console.print(f"  {self.moments[-1][0]:6.1f} s  {words}", markup=False)

    def look_again(self) -> None:
        """One look; where it fails the next one may not."""
        try:
            self.look()
        except FailedError as error:
            console.print(f"  not seen: {error}", markup=False)


class Storm:
    """One storm on a deployment that is Ready. `kill(pod)`: SIGKILL its container, or False where that cannot be done."""

    def __init__(
        self,
        kubectl: Kubectl,
        url: str,
        kill: Callable[[str], bool],
        change_leader: Callable[[], str],
        requests: int,
    ) -> None:
        self._kubectl, self._url, self._kill, self._change_leader = kubectl, url, kill, change_leader
        self._requests = requests
        self._random = random.Random(5)
        self.watch = Watch(kubectl)
        self._output: str | FailedError = ""

    def run(self) -> dict[str, Any]:
        """The report, when every request has ended and pools are back at their smallest."""
        until("encoders have gone to zero", 180, lambda: self.watch.look()["encoder"] == [0, 0])
        client = threading.Thread(target=self._ask, name="client", daemon=True)
        self.watch.note("the client begins: text alone")
        with beside("watch", self.watch.look_again, 2.0):
            client.start()
            self._disturb(client)
            client.join(DEADLINE_SECONDS)
            if client.is_alive():
                raise FailedError(f"requests had not ended after {DEADLINE_SECONDS:.0f} s")
            self.watch.note("every request has ended")
            if isinstance(self._output, FailedError):
                raise self._output
            answers = self._judge([json.loads(line) for line in self._output.splitlines()])
            until("pools are back at their smallest", SETTLE_SECONDS, self._small, pause_seconds=1)
            self.watch.note("pools are back at their smallest")
        return answers | {
            "largest": dict(self.watch.largest),
            "moments": self.watch.moments,
            "replicas": self.watch.rows,
        }

    def _ask(self) -> None:
        code = Path(storm_client.__file__).read_text()
        command = ("exec", "--stdin", "client", "--", "python", "-", self._url, str(self._requests))
        try:
            self._output = self._kubectl(*command, stdin=code, seconds=DEADLINE_SECONDS)
        except FailedError as error:
            self._output = error

    def _disturb(self, client: threading.Thread) -> None:
        """One trouble after the other, beginning when encoders have woken, until the client has all its answers.

        It is told that it has asked enough some seconds after each of the first has come.
        """
        until(
            "encoders have woken", 180, lambda: self.watch.look()["encoder"][1] > 0 or not client.is_alive()
        )
        troubles: list[Callable[[], str]] = [
            lambda: self._end("encoder"),
            lambda: self._end("decode", force=True),
            self._roll_out,
            lambda: f"the operator is killed: {self._change_leader()}",
            lambda: self._end("prefill", force=True),
        ]
        for number in itertools.count():
            client.join(PAUSE_SECONDS if number <= len(troubles) else LATER_PAUSE_SECONDS)
            if number == len(troubles):
                self._kubectl("exec", "client", "--", "touch", str(storm_client.ENOUGH))
            for _ in range(WHOLE_TRIES):
                if not client.is_alive():
                    return
                if all(ready >= wanted for wanted, ready in self.watch.look().values()):
                    break
                client.join(2.0)
            if number < len(troubles):
                self.watch.note(troubles[number]())
            else:
                self.watch.note(self._end(self._random.choice(POOLS), force=self._random.random() < 0.5))

    def _roll_out(self) -> str:
        patch = json.dumps({"spec": {"decode": {"kvBlockTokens": 32}}})
        self._kubectl("patch", "mmd", NAME, "--type=merge", "--patch", patch)
        return "a new pipeline revision rolls out"

    def _end(self, component: str, *, force: bool = False) -> str:
        """Delete a pod in good order, or kill it."""
        selector = f"serving.multimodal.dev/deployment={NAME},app.kubernetes.io/component={component}"
        pods = self._kubectl("get", "pods", "--output=name", "--selector", selector).split()
        if not pods:
            return f"no {component} pod to end"
        pod = self._random.choice(pods).partition("/")[2]
        if not force:
            self._kubectl("delete", "pod", pod, "--wait=false", "--ignore-not-found")
            return f"pod {pod} is deleted"
        if self._kill(pod):
            return f"pod {pod} is killed (SIGKILL)"
        self._kubectl("delete", "pod", pod, "--grace-period=0", "--force", "--ignore-not-found")
        return f"pod {pod} is deleted by force"

    def _small(self) -> bool:
        sizes = self.watch.look()
        return {pool: wanted for pool, (wanted, _) in sizes.items()} == {
            "encoder": 0,
            "prefill": 1,
            "decode": 1,
        }

    def _judge(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """What became of every request, for the report."""
        begins = next(line["storm_begins"] for line in lines if "storm_begins" in line)
        asked = [line for line in lines if "kind" in line]
        right = Oracle()
        lost = [a for a in asked if a["error"] or a["ends"] == 0]
        duplicated = [a for a in asked if a["ends"] > 1]
        wrong = [a for a in asked if a not in lost and a["text"] != right.answer(a["kind"], a["seed"])]
        ttft = {
            f"{kind} {phase}": {"requests": len(values)}
            | {point: round(value, 3) for point, value in report.percentiles(values).items()}
            for phase in ("calm", "storm")
            for kind in ("text", "image", "video", "audio")
            if (
                values := [a["ttft"] for a in asked if (a["kind"], a["phase"]) == (kind, phase) and a["ttft"]]
            )
        }
        return {
            "requests": len(asked),
            "lost": len(lost),
            "duplicated": len(duplicated),
            "wrong": len(wrong),
            "by_kind": Counter(a["kind"] for a in asked),
            "ttft": ttft,
            "storm_began_seconds": round(begins - self.watch.began, 1),
            "arrivals": [(round(a["began"] - self.watch.began, 2), a["kind"], a["ttft"]) for a in asked],
            "examples": [{**a, "expected": right.answer(a["kind"], a["seed"])} for a in [*lost, *wrong][:20]],
        }


class Oracle:
    """Answers of the whole model in this process, each computed once."""

    def __init__(self) -> None:
        import oracle  # that of tests/pipeline; PyTorch comes with it, which no step before needs

        self._generated = oracle.answer
        self._model = Path(str(resources.files("mmd_workers.model") / "demo"))
        self._known: dict[tuple[str, int], str] = {}

    def answer(self, kind: str, seed: int) -> str:
        if (kind, seed) not in self._known:
            self._known[kind, seed] = self._compute(kind, seed)
        return self._known[kind, seed]

    def _compute(self, kind: str, seed: int) -> str:
        if kind == "text":
            question: Any = [storm_client.text_question(seed)]
            return str(self._generated(self._model, question, storm_client.TEXT_TOKENS, ignore_eos=True))
        sample = draw(kind, seed)  # type: ignore[arg-type]
        return str(self._generated(self._model, [(kind, sample.bytes), sample.question], storm_client.TOKENS))


def picture(path: Path, body: dict[str, Any]) -> None:
    """Requests under way by kind, replicas and TTFT over time, with what was done to the deployment."""
    figure = Figure(figsize=(10, 8), layout="constrained")
    arrivals, replicas, ttft = figure.subplots(3, 1, sharex=True)
    end = body["replicas"][-1]["seconds"]
    kinds = ("video", "image", "audio", "text")
    times = [[began for began, kind, _ in body["arrivals"] if kind == k] for k in kinds]
    arrivals.hist(times, bins=int(end // 4) + 1, range=(0, end), stacked=True, label=kinds)
    arrivals.set_ylabel("requests in 4 s")
    arrivals.legend(loc="upper right")
    seconds = [row["seconds"] for row in body["replicas"]]
    for pool in POOLS:
        replicas.step(
            seconds, [row[pool][0] for row in body["replicas"]], where="post", color=COLOURS[pool], label=pool
        )
        ready = [row[pool][1] for row in body["replicas"]]
        replicas.fill_between(seconds, ready, step="post", color=COLOURS[pool], alpha=0.15)
    for moment, _ in body["moments"]:
        replicas.axvline(moment, color="#999999", linewidth=0.6, linestyle=":")
    replicas.set_ylabel("replicas (ready: shaded)")
    replicas.legend(loc="upper right")
    for kind in kinds:
        points = [(began, value) for began, k, value in body["arrivals"] if k == kind and value]
        ttft.plot(*zip(*points, strict=True), ".", markersize=3, label=kind) if points else None
    ttft.set_yscale("log")
    ttft.set_ylabel("TTFT, s")
    ttft.set_xlabel("seconds")
    ttft.legend(loc="upper right")
    figure.savefig(path)
