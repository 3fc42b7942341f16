"""`make e2e`: images, a cluster, the chart, a deployment, questions and answers, and everything gone again. The steps stand in `story`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from rich.markup import escape

from e2e import storm
from e2e.clusters import Cluster, Current, Kind, need
from e2e.faults import Victim
from e2e.images import IMAGES, TAG, VLLM_IMAGE, Buildah, Builder, Docker, builder, docker_runs
from e2e.own_cluster import host
from e2e.own_cluster.cluster import OwnCluster
from e2e.panels import Panels
from e2e.shell import FailedError, run, until
from e2e.steps import Step, Steps, console
from e2e.storm import report
from support.harness.seeds import seed_of_commit

REPOSITORY = Path(__file__).parents[1]
CACHE = REPOSITORY / ".cache" / "e2e"
REPORT = CACHE / "report"
CHART = REPOSITORY / "charts" / "multimodal-operator"
DEMO = REPOSITORY / "examples" / "demo.yaml"
RELEASE = "multimodal-operator"
OPERATOR_NAMESPACE = "multimodal-system"
OPERATORS = "app.kubernetes.io/name=multimodal-operator"
NAMESPACE = "e2e"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
OWNED_BY = "serving.multimodal.dev/deployment"
OWNED = f"{OWNED_BY}=demo"
KINDS = "pods,services,secrets,configmaps,statefulsets,deployments,poddisruptionbudgets,networkpolicies"
CRD = "multimodaldeployments.serving.multimodal.dev"


class Story:
    """One run on one cluster."""

    def __init__(self, cluster: Cluster, builder: Builder, registry: str, steps: Steps) -> None:
        self.cluster, self.builder, self.registry, self.steps = cluster, builder, registry, steps
        self.prefix = f"{registry}/" if registry else ""

    def start(self, vllm: bool) -> None:
        with self.steps.step("images built") as step:
            self.builder.prepare()
            wanted = (*IMAGES, VLLM_IMAGE) if vllm else IMAGES
            images = {image: self.builder.build(image) for image in wanted}
            step.note = self.builder.name
        with self.steps.step("cluster started") as step:
            step.note = self.cluster.start()
        with self.steps.step("images given to its nodes"):
            self.cluster.load(images, self.builder)

    def serve(self) -> None:
        with self.steps.step("chart installed"):
            self.make_namespace(OPERATOR_NAMESPACE)
            self.install_chart()
        with self.steps.step("deployment is Ready") as step:
            self.make_namespace(NAMESPACE)
            self.apply(yaml.safe_load(DEMO.read_text()))
            self.wait_ready(seconds=420)
            step.note = self.kubectl("get", "mmd", "demo", "--no-headers").strip()
        with self.steps.step("client started"):
            self.start_client()
        with self.steps.step("image, video, audio and text questions are answered right") as step:
            self.ask(step)
        self.record("ready")

    def disturb(self) -> None:
        with self.steps.step("chart upgraded to serve one namespace, workers untouched"):
            before = self.worker_pods()
            self.install_chart(f"--set=namespaces={{{NAMESPACE}}}")
            if rights := self.cluster_wide_rights():
                raise FailedError(f"an operator of one namespace still has {rights}")
            if before != self.worker_pods():
                raise FailedError(
                    f"an upgrade of the operator replaced pods: {before} → {self.worker_pods()}"
                )
        with self.steps.step("operator killed, another goes on") as step:
            step.note = self.change_leader()
        with self.steps.step("one decode worker drained, questions still answered right") as step:
            self.kubectl(
                "patch", "mmd", "demo", "--type=merge", "--patch", '{"spec": {"decode": {"replicas": 1}}}'
            )
            until("one decode pod is left", 180, lambda: len(self.worker_pods("decode")) == 1)
            self.wait_ready(seconds=120)
            self.ask(step)
        self.record("scaled")

    def delete_demo(self) -> None:
        with self.steps.step("deployment deleted with everything it owned"):
            self.kubectl("delete", "mmd", "demo", "--timeout=240s", seconds=250)
            until("nothing of it is left", 60, lambda: not self.owned())
            self.record("deleted")

    def weather_storm(self, weather: storm.Weather, questions: int, seed: int) -> None:
        with self.steps.step(f"a deployment that scales is Ready: {weather.name}"):
            self.apply(weather.manifest)
            self.wait_ready(seconds=420, name=weather.name)
        with self.steps.step(f"{weather.name}: pools grow, shrink and crash, and no request is lost") as step:
            url = f"http://{weather.name}-gateway.{NAMESPACE}.svc:8000"
            operators = Victim("operator", OPERATOR_NAMESPACE, OPERATORS)
            log = REPORT / f"{weather.name}-client.jsonl"
            run = storm.Storm(
                weather, self.kubectl, url, self.kill, NAMESPACE, operators, questions, seed, log
            )
            command, environment = self.tool("kubectl")
            panels = Panels([command], environment, NAMESPACE, weather.name)
            try:
                with tempfile.TemporaryDirectory() as folder, panels.looking(Path(folder)):
                    body = run.run()
            finally:
                self.record(weather.name)
            body["alerts"] = dict(panels.fired)
            body["weaknesses"] = storm.weaknesses(body, weather)
            (REPORT / f"{weather.name}.json").write_text(json.dumps(report.facts() | body, indent=1) + "\n")
            storm.picture(REPORT / f"{weather.name}.png", body)
            step.note = ", ".join(f"{key} {body[key]}" for key in storm.HEADLINE)
            for kind, figures in body["ttft"].items():
                console.print(f"  TTFT {kind}: {figures}", markup=False)
            for weakness in body["weaknesses"]:
                console.print(f"  [yellow]weaker than meant[/yellow]: {escape(weakness)}")
            if short := storm.shortcomings(body):
                raise FailedError("\n".join(short))
        if not weather.kills:
            self.check_panels(panels)
        with self.steps.step(f"{weather.name} deleted"):
            self.kubectl("delete", "mmd", weather.name, "--timeout=240s", seconds=250)
            # its pods too: a namespace with pods that still end is deleted only after their grace
            until("nothing of it is left", 120, lambda: not self.owned(weather.name))

    def check_panels(self, panels: Panels) -> None:
        with self.steps.step("every panel of the dashboards had data") as step:
            step.note = f"{panels.asked} queries; of trouble {len(panels.troubles)} silent"
            if panels.silent:
                raise FailedError(
                    "no data for\n" + "\n".join(f"{title}: {expr}" for title, expr in panels.silent)
                )
        with self.steps.step("alerts told of the rollout and of nothing lost") as step:
            step.note = ", ".join(f"{alert} {count}" for alert, count in sorted(panels.fired.items()))
            if "MmdRevisionMix" not in panels.fired or "MmdRequestsLost" in panels.fired:
                raise FailedError(f"fired: {step.note}")

    def remove(self) -> None:
        with self.steps.step("a deployment is Ready again"):
            self.apply(yaml.safe_load(DEMO.read_text()))
            self.wait_ready(seconds=420)
        with self.steps.step("its namespace deleted while it serves, gone within two minutes"):
            self.kubectl("delete", "namespace", NAMESPACE, "--timeout=120s", seconds=130)
        with self.steps.step("chart uninstalled, the CRD kept"):
            self.helm("uninstall", RELEASE, "--wait", seconds=120)
            self.kubectl("get", "crd", CRD)
            if left := self.cluster_wide_rights():
                raise FailedError(f"helm uninstall left {left}")
        with self.steps.step("installed and removed by kubectl apply -k"):
            config = self.kustomization()
            apply = ("apply", "--server-side", "--force-conflicts", "--kustomize", config)
            self.kubectl(*apply, namespace=OPERATOR_NAMESPACE)
            self.wait_operator()
            delete = ("delete", "--kustomize", config, "--timeout=90s")
            self.kubectl(*delete, namespace=OPERATOR_NAMESPACE, seconds=100)

    def end(self) -> None:
        with self.steps.step("cluster removed, nothing left behind"):
            self.cluster.stop()
            if left := self.cluster.leftovers():
                raise FailedError("left behind:\n" + "\n".join(left))

    def install_chart(self, *options: str) -> None:
        image = (f"--set=image.repository={self.prefix}multimodal-operator", f"--set=image.tag={TAG}")
        self.helm("upgrade", "--install", RELEASE, CHART, *image, *options)
        self.wait_operator()

    def cluster_wide_rights(self) -> str:
        selector = f"app.kubernetes.io/instance={RELEASE}"
        return self.kubectl(
            "get", "clusterroles,clusterrolebindings", "--output=name", "--selector", selector
        )

    def wait_operator(self) -> None:
        self.kubectl(
            *("rollout", "status", f"deployment/{RELEASE}", "--timeout=120s"),
            namespace=OPERATOR_NAMESPACE,
            seconds=130,
        )
        until("an operator holds the lease", 60, lambda: self.leader() in self.operator_pods())

    def apply(self, deployment: dict[str, Any]) -> None:
        """Apply a deployment, with this run's images if nodes pull them from a registry."""
        spec = deployment["spec"]
        if self.registry:
            worker = spec.get("image", {}).get("worker", f"multimodal-worker:{TAG}")
            images = {"worker": self.prefix + worker, "nats": f"{self.prefix}multimodal-nats:{TAG}"}
            deployment = {**deployment, "spec": {**spec, "image": images}}
        self.kubectl("apply", "--filename=-", stdin=yaml.safe_dump(deployment))

    def kill(self, pod: str, namespace: str) -> bool:
        """SIGKILL a pod's container from outside, as the kernel would; False where the nodes are out of reach."""
        path = "--output=jsonpath={.status.containerStatuses[0].containerID}"
        found = self.kubectl("get", "pod", pod, path, "--ignore-not-found", namespace=namespace)
        container = found.rpartition("/")[2]
        return bool(container) and self.cluster.kill(container)

    def wait_ready(self, seconds: int, name: str = "demo") -> None:
        """Wait until the resource's current generation is Ready, not an earlier one."""
        generation = int(self.kubectl("get", "mmd", name, "--output=jsonpath={.metadata.generation}"))
        path = '{.status.conditions[?(@.type=="Ready")]}'

        def ready() -> bool:
            found = self.kubectl("get", "mmd", name, f"--output=jsonpath={path}")
            condition = json.loads(found or "{}")
            if condition.get("status") == "True" and condition.get("observedGeneration") == generation:
                return True
            raise FailedError(f"{condition.get('reason')}: {condition.get('message')}")

        until("the deployment is Ready", seconds, ready, pause_seconds=1)

    def start_client(self) -> None:
        container = {
            "name": "client",
            "image": f"{self.prefix}multimodal-worker:{TAG}",
            "imagePullPolicy": "IfNotPresent",
            "command": ["sleep", "infinity"],
            "resources": {"requests": {"cpu": "100m"}},  # a starved client sends little and sees answers late
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
        security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        spec = {
            "containers": [container],
            "securityContext": security,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "client"}, "spec": spec}
        self.kubectl("apply", "--filename=-", stdin=yaml.safe_dump(pod))
        self.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=60s", seconds=70)

    def ask(self, step: Step) -> None:
        questions = Path(__file__).with_name("questions.py").read_text()
        url = f"http://demo-gateway.{NAMESPACE}.svc:8000"
        command = ("exec", "--stdin", "client", "--", "python", "-", url)
        answers = [
            json.loads(line) for line in self.kubectl(*command, stdin=questions, seconds=240).splitlines()
        ]
        for a in answers:
            console.print(
                f"  {a['label']:5} {a['question']} → {a['answer']} ({a['milliseconds']} ms)", markup=False
            )
        wrong = [a for a in answers if a["answer"] != a["expected"]]
        if wrong or len(answers) != 5:
            raise FailedError(f"{len(answers)} of 5 answers, and these are wrong: {wrong}")
        step.note = ", ".join(f"{a['label']} {a['milliseconds']} ms" for a in answers)

    def change_leader(self) -> str:
        """Kill the operator that acts; another has to take the lease."""
        before = self.leader()
        self.kubectl("delete", "pod", before, "--grace-period=0", "--force", namespace=OPERATOR_NAMESPACE)
        until("another operator leads", 90, lambda: self.leader() not in ("", before))
        return f"{before} → {self.leader()}"

    def leader(self) -> str:
        """The pod that holds the lease."""
        path = "--output=jsonpath={.spec.holderIdentity}"
        holder = self.kubectl(
            "get", "lease", RELEASE, path, "--ignore-not-found", namespace=OPERATOR_NAMESPACE
        )
        return holder.split("_")[0]

    def operator_pods(self) -> list[str]:
        """The operator's pods, without terminating ones."""
        command = ("get", "pods", "--output=json", "--selector", OPERATORS)
        found = self.kubectl(*command, namespace=OPERATOR_NAMESPACE)
        pods = [pod["metadata"] for pod in json.loads(found)["items"]]
        return [pod["name"] for pod in pods if "deletionTimestamp" not in pod]

    def worker_pods(self, component: str = "") -> dict[str, str]:
        """UIDs of worker pods by name."""
        selector = OWNED + (f",app.kubernetes.io/component={component}" if component else "")
        pods = json.loads(self.kubectl("get", "pods", "--output=json", "--selector", selector))["items"]
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}

    def owned(self, name: str = "demo") -> list[str]:
        return self.kubectl("get", KINDS, "--output=name", "--selector", f"{OWNED_BY}={name}").split()

    def kustomization(self) -> Path:
        """The one in the repository, or one over it with the registry's image."""
        config = REPOSITORY / "config"
        if not self.registry:
            return config
        folder = CACHE / "kustomization"
        folder.mkdir(exist_ok=True)
        image = {"name": "multimodal-operator", "newName": f"{self.prefix}multimodal-operator", "newTag": TAG}
        body = {"resources": [os.path.relpath(config, folder)], "images": [image]}
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(body))
        return folder

    def make_namespace(self, name: str) -> None:
        namespace = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": RESTRICTED},
        }
        self.kubectl("apply", "--filename=-", stdin=yaml.safe_dump(namespace))

    def record(self, moment: str) -> None:
        """What a user would see now, for the report and the documentation."""
        views = {
            "get-mmd": ("get", "mmd", "--output=wide"),
            "describe-mmd": ("describe", "mmd"),
            "get-pods": ("get", "pods", "--output=wide"),
            "get-events": ("get", "events", "--sort-by=.lastTimestamp"),
            "operator-log": (
                "logs",
                "--namespace",
                OPERATOR_NAMESPACE,
                "--selector",
                f"app.kubernetes.io/instance={RELEASE}",
                "--tail=200",
            ),
        }
        for name, command in views.items():
            try:
                words = self.kubectl(*command)
            except FailedError as error:
                words = str(error)
            (REPORT / f"{moment}-{name}.txt").write_text(words)

    def kubectl(
        self,
        *arguments: str | Path,
        stdin: str | None = None,
        seconds: float = 60,
        namespace: str = NAMESPACE,
    ) -> str:
        return self._tool("kubectl", f"--namespace={namespace}", *arguments, stdin=stdin, seconds=seconds)

    def helm(self, *arguments: str | Path, seconds: float = 60) -> str:
        return self._tool("helm", f"--namespace={OPERATOR_NAMESPACE}", *arguments, seconds=seconds)

    def tool(self, name: str) -> tuple[str | Path, dict[str, str]]:
        """A program that speaks to this cluster, and what its environment must have."""
        program = self.cluster.tools / name if self.cluster.tools else name
        return program, {"KUBECONFIG": str(self.cluster.kubeconfig), "HOME": str(CACHE)}

    def _tool(self, name: str, *arguments: str | Path, stdin: str | None = None, seconds: float) -> str:
        program, environment = self.tool(name)
        return run(program, *arguments, stdin=stdin, seconds=seconds, env=environment)


def choose(name: str, registry: str) -> tuple[Cluster, Builder]:
    """The cluster, and what makes images that it can take.

    Raises:
        FailedError: this machine can do neither; the message says what to install.
    """
    need("prometheus")
    if name == "current":
        need("kubectl", "helm")
        return Current(registry), builder(CACHE)
    if name == "kind" or (name == "auto" and shutil.which("kind") and docker_runs()):
        need("docker", "kind", "kubectl", "helm")
        if not docker_runs():
            raise FailedError("no docker daemon answers; start it, or use --cluster own")
        return Kind(CACHE), Docker()
    host.check()
    return OwnCluster(CACHE), Buildah(CACHE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cluster",
        choices=["auto", "own", "kind", "current"],
        default="auto",
        help="own: made here as root; kind: in docker; current: KUBECONFIG's. auto: kind where it and docker run, else own",
    )
    parser.add_argument("--registry", default="", help="HOST/PATH that the current cluster's nodes pull from")
    parser.add_argument("--keep", action="store_true", help="leave the cluster and the deployment running")
    parser.add_argument(
        "--stop", action="store_true", help="remove what --keep, or a run that was killed, left"
    )
    parser.add_argument(
        "--questions", type=int, default=storm.STORM.questions, help="fewest questions of the storm"
    )
    parser.add_argument(
        "--seed", type=int, default=seed_of_commit(), help="of the storm's faults; default: from the commit"
    )
    parser.add_argument(
        "--vllm",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a second storm, on pools with vLLM",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    REPORT.mkdir(parents=True, exist_ok=True)
    try:
        cluster, images = choose(options.cluster, options.registry)
    except FailedError as error:
        console.print(f"make e2e cannot run here: {error}", markup=False)
        return 1
    story = Story(cluster, images, options.registry, Steps())
    return remove(story) if options.stop else execute(story, options)


def execute(story: Story, options: argparse.Namespace) -> int:
    """The whole run; 0 when every step went well. Whatever happens, the cluster is removed, unless it is to be kept."""
    failure: BaseException | None = None
    try:
        story.start(options.vllm)
        story.serve()
        if options.keep:
            tools = f" PATH={story.cluster.tools}:$PATH" if story.cluster.tools else ""
            console.print(f"export KUBECONFIG={story.cluster.kubeconfig}{tools}", soft_wrap=True)
            return 0
        story.disturb()
        story.delete_demo()
        story.weather_storm(storm.STORM, options.questions, options.seed)
        if options.vllm:
            story.weather_storm(storm.VLLM_STORM, storm.VLLM_STORM.questions, options.seed)
        story.remove()
    except FailedError as error:
        failure = error
        story.record("failed")
    except (KeyboardInterrupt, SystemExit) as error:
        failure = error
    status = remove(story)
    console.print(story.steps.table())
    if failure is not None:
        console.print(
            f"[red]failed[/red]: {escape(str(failure) or type(failure).__name__)}\nmore in {REPORT}"
        )
        return 1
    return status


def remove(story: Story) -> int:
    try:
        story.end()
    except FailedError as error:
        console.print(f"[red]failed[/red]: {escape(str(error))}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
