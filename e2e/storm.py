"""The storm: thousands of real requests while pools grow and shrink, a revision rolls out, and pods of every kind are deleted and killed.

Every answer must be that of `generate` of the whole model, token for token; the report counts what was lost, answered twice or
wrong, and separately what a killed gateway cut off and a repetition answered.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from bench import report
from e2e import storm_client
from e2e.faults import Faults, Kill, Victim
from e2e.images import VLLM_IMAGE
from e2e.judge import LONG_SECONDS, PACED, in_flight, judge, longest_after, parse
from e2e.shell import FailedError, in_background, until
from e2e.steps import console
from mmd_cli.samples import draw
from support.cluster.manifests import merge

MANIFEST = Path(__file__).with_name("storm.yaml")


@dataclass(frozen=True)
class Weather:
    """What a storm is like, and what it must show.

    `changes`: to the manifest, as a merge patch. `largest`: the size that each pool must reach. `kills`: components of which one pod
    each is killed; empty: every kind of fault, a rollout and new gateways. `fewest_faults`: that must strike while requests are in
    flight. `long_streams`: streams of minutes that run throughout.
    """

    name: str
    changes: dict[str, Any]
    largest: dict[str, int]
    questions: int
    fewest_faults: int
    long_streams: int
    kills: tuple[str, ...] = ()

    @property
    def manifest(self) -> dict[str, Any]:
        """The deployment of the storm."""
        named = merge(yaml.safe_load(MANIFEST.read_text()), {"metadata": {"name": self.name}})
        changed: dict[str, Any] = merge(named, self.changes)
        return changed

    @property
    def selector(self) -> str:
        """Of everything that belongs to the deployment."""
        return f"serving.multimodal.dev/deployment={self.name}"


STORM = Weather(
    name="storm",
    changes={},
    largest={"encoder": 3, "prefill": 2, "decode": 2},
    questions=2000,
    fewest_faults=12,
    long_streams=2,
)
VLLM_STORM = Weather(
    name="storm-vllm",
    changes={
        "spec": {
            "image": {"worker": VLLM_IMAGE.tagged},
            "engine": {"type": "VLLM"},
            "encoder": {"autoscaling": {"maxReplicas": 2}},
            "prefill": {"replicas": 1, "autoscaling": None},
        }
    },
    largest={"encoder": 2, "prefill": 1, "decode": 2},
    questions=300,
    fewest_faults=2,
    long_streams=0,
    kills=("prefill", "decode"),
)
POOLS = tuple(STORM.largest)
DEADLINE_SECONDS = 1500.0
LONGEST_OUTAGE_SECONDS = (
    60.0  # without a Ready gateway: kubelet backs off for 10 or 20 s where one was killed again and again
)
SETTLE_SECONDS = 240.0
HEADLINE = (
    *("seed", "questions", "lost", "duplicated", "wrong", "cut_by_a_killed_gateway_and_right_when_repeated"),
    *("streams_of_minutes_seconds", "largest"),
)
"""What the step's note shows of the report."""
COLOURS = {"encoder": "#d95f02", "prefill": "#1b9e77", "decode": "#7570b3"}
Kubectl = Callable[..., str]


@dataclass
class Watch:
    """Replicas asked for and ready by pool, over all revisions, every few seconds.

    `largest`: the most replicas that one StatefulSet of the pool was asked to have, so that the old alongside the new of a
    rollout does not count as growth.
    """

    kubectl: Kubectl
    weather: Weather
    began: float = field(default_factory=time.time)
    rows: list[dict[str, Any]] = field(default_factory=list)
    gateways: list[tuple[float, int]] = field(default_factory=list)
    """Unix seconds, and how many gateways were Ready then."""
    recovering: list[str] = field(default_factory=list)
    """Components of which not all pods were Ready at the last look."""
    moments: list[tuple[float, str]] = field(default_factory=list)
    largest: Counter[str] = field(default_factory=Counter)

    def look(self) -> dict[str, list[int]]:
        at = time.time()
        found = json.loads(
            self.kubectl(
                "get", "statefulsets,deployments,pods", "--output=json", f"--selector={self.weather.selector}"
            )
        )["items"]
        sizes = {pool: [0, 0] for pool in POOLS}
        gateways = 0
        recovering = set()
        for item in found:
            component = item["metadata"]["labels"]["app.kubernetes.io/component"]
            if item["kind"] == "Pod":
                gateways += component == "gateway" and _is_ready(item)
                continue
            wanted, ready = item["spec"]["replicas"], item.get("status", {}).get("readyReplicas", 0)
            if ready < wanted:
                recovering.add(component)
            if component in sizes:
                self.largest[component] = max(self.largest[component], wanted)
                sizes[component][0] += wanted
                sizes[component][1] += ready
        self.recovering = sorted(recovering)
        self.gateways.append((at, gateways))
        self.rows.append({"seconds": round(time.time() - self.began, 1)} | sizes)
        return sizes

    def without_gateway(self) -> list[tuple[float, float]]:
        """When none was Ready: each from the last look that found one to the next that did."""
        spans = []
        last_found = self.began
        for (_, before), (at, count) in pairwise([(self.began, 1), *sorted(self.gateways)]):
            if count and not before:
                spans.append((last_found, at))
            if count:
                last_found = at
        return spans

    def note(self, words: str) -> None:
        self.moments.append((round(time.time() - self.began, 1), words))
        console.print(f"  {self.moments[-1][0]:6.1f} s  {words}", markup=False)

    def look_again(self) -> None:
        """Look once, tolerating a failure: the next look may succeed."""
        try:
            self.look()
        except FailedError as error:
            console.print(f"  not seen: {error}", markup=False)


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any((c["type"], c["status"]) == ("Ready", "True") for c in conditions)


class Storm:
    """One storm on a deployment that is Ready. `kill(pod, namespace)`: SIGKILL its container, or False where that cannot be done."""

    def __init__(
        self,
        weather: Weather,
        kubectl: Kubectl,
        url: str,
        kill: Kill,
        namespace: str,
        operators: Victim,
        questions: int,
        seed: int,
        log: Path,
    ) -> None:
        self._weather = weather
        self._kubectl, self._url, self._questions, self._log = kubectl, url, questions, log
        own = [
            Victim(component, namespace, f"{weather.selector},app.kubernetes.io/component={component}")
            for component in (*POOLS, "gateway", "nats")
        ]
        self.faults = Faults(seed, kubectl, kill, [*own, operators], self._roll_out, weather.kills)
        self.watch = Watch(kubectl, weather)
        self.overlapping = 0
        self._gateways_replaced = 0.0
        self._output: str | FailedError = ""

    def run(self) -> dict[str, Any]:
        """The report, when every request has ended and pools are back at their smallest."""
        console.print(f"  seed of the faults: {self.faults.seed} (--seed repeats them)", markup=False)
        until("encoders have gone to zero", 180, lambda: self.watch.look()["encoder"] == [0, 0])
        client = threading.Thread(target=self._ask, name="client", daemon=True)
        self.watch.note("the client begins: text alone")
        with in_background("watch", self.watch.look_again, 2.0):
            client.start()
            self._disturb(client)
            client.join(DEADLINE_SECONDS)
            if client.is_alive():
                raise FailedError(f"requests had not ended after {DEADLINE_SECONDS:.0f} s")
            self.watch.note("every request has ended")
            if isinstance(self._output, FailedError):
                raise self._output
            self._log.write_text(self._output)
            answers = self._judge(parse(self._output))
            until("pools are back at their smallest", SETTLE_SECONDS, self._small, pause_seconds=1)
            self.watch.note("pools are back at their smallest")
        return answers | {
            "largest": dict(self.watch.largest),
            "moments": self.watch.moments,
            "replicas": self.watch.rows,
        }

    def _ask(self) -> None:
        code = Path(storm_client.__file__).read_text()
        streams = str(self._weather.long_streams)
        command = ("exec", "--stdin", "client", "--", "python", "-", self._url, str(self._questions), streams)
        try:
            self._kubectl("exec", "client", "--", "rm", "-f", str(storm_client.ENOUGH))
            self._output = self._kubectl(*command, stdin=code, seconds=DEADLINE_SECONDS)
        except FailedError as error:
            self._output = error

    def _disturb(self, client: threading.Thread) -> None:
        """Replace the gateways, then strike until no fault is left, whatever still recovers; begins when encoders have woken. Then the
        client may end.
        """
        until(
            "encoders have woken", 180, lambda: self.watch.look()["encoder"][1] > 0 or not client.is_alive()
        )
        if not self._weather.kills:
            self._replace_gateways()
        while len(self.faults) and client.is_alive():
            client.join(self.faults.pause_seconds())
            self.watch.look()
            recovering = self.watch.recovering
            if struck := self.faults.strike():
                self.watch.note(f"{struck}{f'; {recovering} still recover' if recovering else ''}")
                self.overlapping += bool(recovering)
        self._kubectl("exec", "client", "--", "touch", str(storm_client.ENOUGH))

    def _roll_out(self) -> None:
        patch = json.dumps({"spec": {"decode": {"kvBlockTokens": 32}}})
        self._kubectl("patch", "mmd", self._weather.name, "--type=merge", "--patch", patch)

    def _replace_gateways(self) -> None:
        """A setting that gateways are made from changes: those that hold streams of minutes must end them before they exit."""
        patch = json.dumps({"spec": {"gateway": {"resources": {"cpu": "55m"}}}})
        self._gateways_replaced = time.time()
        self._kubectl("patch", "mmd", self._weather.name, "--type=merge", "--patch", patch)
        self.watch.note("the gateways are replaced")

    def _small(self) -> bool:
        sizes = self.watch.look()
        smallest = {"encoder": 0, "prefill": 1, "decode": 1}
        return {pool: wanted for pool, (wanted, _) in sizes.items()} == smallest

    def _judge(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """What became of every request, for the report."""
        begins = next((line["storm_begins"] for line in lines if "storm_begins" in line), None)
        if begins is None:
            raise FailedError(f"the client's log of {len(lines)} lines ends before its storm began")
        right = Oracle()
        right.learn(lines)
        verdict = judge(lines, self.faults.struck, right.tokens, self.watch.without_gateway())
        asked = verdict.answers
        ttft = {
            f"{kind} {phase}": {"requests": len(values)}
            | {point: round(value, 3) for point, value in report.percentiles(values).items()}
            for phase in ("calm", "storm")
            for kind in storm_client.MAX_TOKENS
            if (
                values := [a["ttft"] for a in asked if (a["kind"], a["phase"]) == (kind, phase) and a["ttft"]]
            )
        }
        moments = [struck.began for struck in self.faults.struck]
        flights = in_flight(lines, moments)
        long_flights = in_flight([line for line in lines if line.get("kind") == PACED], moments)
        bad = [line for found in (verdict.lost, verdict.duplicated, verdict.wrong) for line in found[:7]]
        return {
            "seed": self.faults.seed,
            "questions": verdict.questions,
            "lost": len(verdict.lost),
            "duplicated": len(verdict.duplicated),
            "wrong": len(verdict.wrong),
            "cut_by_a_killed_gateway_and_right_when_repeated": len(verdict.cut),
            "streams_of_minutes_seconds": verdict.long_streams,
            "longest_stream_after_gateways_were_replaced_seconds": round(
                longest_after(asked, self._gateways_replaced), 1
            ),
            "faults": [
                {**asdict(struck), "requests_in_flight": flight, "long_streams_in_flight": long}
                for struck, flight, long in zip(self.faults.struck, flights, long_flights, strict=True)
            ],
            "faults_while_recovering": self.overlapping,
            "seconds_without_gateway": [
                round(ended - began, 1) for began, ended in self.watch.without_gateway()
            ],
            "by_kind": Counter(a["kind"] for a in asked),
            "ttft": ttft,
            "storm_began_seconds": round(begins - self.watch.began, 1),
            "arrivals": [(round(a["began"] - self.watch.began, 2), a["kind"], a["ttft"]) for a in asked],
            "examples": [_example(a, right) for a in bad],
        }


def _example(line: dict[str, Any], right: Oracle) -> dict[str, Any]:
    """A request that was not answered well, with the answer that is right."""
    return {**line, "expected": right.tokens(line["kind"], line["seed"])} if "kind" in line else line


def _brief(line: dict[str, Any], faults: list[dict[str, Any]]) -> str:
    """One line on a request that was not answered well, with the fault before its end; short enough for the tail of a log."""
    facts: dict[str, Any] = {
        name: line[name] for name in ("question", "kind", "phase", "attempt", "ends") if name in line
    }
    if "ended" in line:
        facts |= {"seconds": round(line["ended"] - line["began"], 1), "tokens": len(line["tokens"])}
        if before := [fault for fault in faults if fault["began"] <= line["ended"]]:
            fault = before[-1]
            way = f"{fault['pod']} {'killed' if fault['killed'] else 'deleted'}" if fault["pod"] else "begun"
            seconds = line["ended"] - fault["began"]
            facts["fault"] = f"{fault['component']} {way} {seconds:.1f} s before the end"
    ends = "answered more than once" if line.get("ends", 0) > 1 else "ended without a finish reason"
    return f"{line.get('difference') or line.get('error') or ends}: {facts}"


def shortcomings(body: dict[str, Any]) -> list[str]:
    """Broken promises, whatever the draw of the faults was; empty if the run passes."""
    found = [f"{body[what]} requests {what}" for what in ("lost", "duplicated", "wrong") if body[what]]
    if not any(fault["requests_in_flight"] for fault in body["faults"]):
        found.append("there was no storm: no fault struck while requests were in flight")
    return found + [_brief(example, body["faults"]) for example in body["examples"]]


def weaknesses(body: dict[str, Any], weather: Weather = STORM) -> list[str]:
    """In what the run was a weaker test than it is meant to be. That depends on the draw of the faults and on the machine, so it fails nothing."""
    found = []
    if (longest := max(body["seconds_without_gateway"], default=0)) > LONGEST_OUTAGE_SECONDS:
        found.append(f"no gateway was Ready for {longest:.0f} s")
    if body["largest"] != weather.largest:
        found.append(f"pools did not follow the storm: {body['largest']}, not {weather.largest}")
    fewest = weather.fewest_faults
    if (struck := sum(fault["requests_in_flight"] > 0 for fault in body["faults"])) < fewest:
        found.append(f"{struck} faults struck while requests were in flight, not {fewest}")
    return found if weather.kills else [*found, *_weaknesses_of_long_streams(body, weather)]


def _weaknesses_of_long_streams(body: dict[str, Any], weather: Weather) -> list[str]:
    found = []
    fewest = weather.fewest_faults
    if (struck := sum(fault["long_streams_in_flight"] > 0 for fault in body["faults"])) < fewest:
        found.append(f"{struck} faults struck while a stream of minutes was under way, not {fewest}")
    if not body["faults_while_recovering"]:
        found.append("no fault struck while pods recovered from another")
    if len(body["streams_of_minutes_seconds"]) < weather.long_streams:
        found.append(f"streams longer than two minutes: {body['streams_of_minutes_seconds']}")
    went_on = body["longest_stream_after_gateways_were_replaced_seconds"]
    if went_on <= LONG_SECONDS:
        found.append(
            f"the longest stream through the replacement of the gateways ended {went_on} s after it began"
        )
    return found


class Oracle:
    """Answers of the whole model in this process, each computed once."""

    def __init__(self) -> None:
        from support.oracles import oracle  # PyTorch comes with it, which no step before needs

        self._generated, self._is_greedy = oracle.tokens, oracle.is_greedy
        self._model = Path(str(resources.files("mmd_workers.model") / "demo"))
        self._known: dict[tuple[str, int], list[int]] = {}

    def learn(self, lines: list[dict[str, Any]]) -> None:
        """Remember the correct answers of thousands of tokens in the log: checking one is quick, generating it takes a minute."""
        for line in lines:
            key = (line.get("kind"), line.get("seed"))
            complete = key[0] == "long" and len(line.get("tokens", ())) == storm_client.MAX_TOKENS["long"]
            if complete and key not in self._known:
                text = storm_client.text_question("long", line["seed"])
                if self._is_greedy(self._model, text, line["tokens"]):
                    self._known[line["kind"], line["seed"]] = line["tokens"]

    def tokens(self, kind: str, seed: int) -> list[int]:
        if (kind, seed) not in self._known:
            self._known[kind, seed] = self._compute(kind, seed)
        return self._known[kind, seed]

    def _compute(self, kind: str, seed: int) -> list[int]:
        question: Any = [storm_client.text_question(kind, seed)]
        if kind in storm_client.MODALITIES:
            sample = draw(kind, seed)  # type: ignore[arg-type]
            question = [(kind, sample.bytes), sample.question]
        most = storm_client.MAX_TOKENS[kind]
        return list(self._generated(self._model, question, most, ignore_eos=kind in storm_client.TO_THE_END))


def picture(path: Path, body: dict[str, Any]) -> None:
    """Requests in flight by kind, replicas and TTFT over time, with what was done to the deployment."""
    figure = Figure(figsize=(10, 8), layout="constrained")
    arrivals, replicas, ttft = figure.subplots(3, 1, sharex=True)
    end = body["replicas"][-1]["seconds"]
    kinds = (*storm_client.ASKERS, "text", "long")
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
