"""A real one-node Kubernetes on this machine without docker: etcd, control plane, kubelet, kube-proxy, CoreDNS, containerd.

Root is needed, and Debian's containerd, runc and network plugins; the Kubernetes programs come from kubernetes/build.sh. Everything
listens on loopback or on the bridge's address, lives in two folders, and is removed by `stop`, also after an earlier run that was
killed. Images stay in the cache, for the next run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import yaml
from images import PAUSE, Buildah, Builder, Image
from keys import Authority
from shell import FailedError, Processes, command_line, pipe, run, until

RUN = Path("/run/multimodal-e2e")
"""Sockets, process ids, keys and configuration."""
STATE = Path("/var/lib") / RUN.name
"""etcd, volumes and logs."""
BRIDGE = "mmd-e2e0"
HOST = "10.222.0.1"
PODS = "10.222.0.0/16"
SERVICES = "10.223.0.0/16"
API_SERVICE = "10.223.0.1"
DNS_SERVICE = "10.223.0.10"
DNS_PORT = 10053
NODE = "e2e"
PLUGINS = Path("/usr/lib/cni")
PROGRAMS = {
    "containerd": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "xz": "xz-utils",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
}
"""What must be on the PATH, and the Debian package that it comes from."""
SERVERS = (
    *("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "coredns", "kube-apiserver"),
    *("etcd", "containerd"),
)
"""In the order in which they stop. Pods are deleted when nobody makes new ones and while kubelet still runs."""
SYSCTLS = (
    *("net/ipv4/ip_forward", "net/ipv4/conf/all/route_localnet", "net/bridge/bridge-nf-call-iptables"),
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)
"""What kubelet, kube-proxy and the bridge change."""
CONTAINERD_STARTS = "server is not initialized yet"
"""What kubelet ends with while containerd answers already, but not to Kubernetes: it looks through the images it has."""
MADE = (Path("/var/lib/kubelet"), Path("/var/log/containers"), Path("/run/containerd"), Path("/var/lib/cni"))
"""Folders that kubelet, containerd and the network plugins make wherever they are told to live."""


class OwnCluster:
    """See the module."""

    name = "own"

    def __init__(self, cache: Path) -> None:
        self.kubeconfig = RUN / "admin.kubeconfig"
        self.tools: Path | None = cache.parent / "kubernetes"
        self._images = cache / "containerd"
        self._processes = Processes(RUN, STATE / "logs")
        self._socket = RUN / "containerd.sock"

    def start(self) -> str:
        self.check()
        self.stop()
        self._build_programs()
        for folder in (RUN / "keys", RUN / "cni", STATE / "logs", self._images):
            folder.mkdir(parents=True) if folder != self._images else folder.mkdir(
                parents=True, exist_ok=True
            )
        RUN.chmod(0o700)
        self._remember()
        self._make_bridge()
        self._make_keys()
        self._start_control_plane()
        self._start_node()
        self._start_dns()
        self._wait_ready()
        return "Kubernetes " + json.loads(self._kubectl("get", "--raw=/version"))["gitVersion"]

    def load(self, images: Mapping[Image, str], builder: Builder) -> None:
        """Import those that the last run did not leave in the cache."""
        if not isinstance(builder, Buildah):
            raise FailedError("this cluster takes images from buildah; stop docker, or install kind")
        for image, identity in {**images, PAUSE: builder.build(PAUSE)}.items():
            stamp = self._images / f"{image.name}.id"
            if stamp.exists() and stamp.read_text() == identity:
                continue
            command = self._ctr("images", "import", "-")
            pipe(builder.archive(image), command, seconds=600, env=builder.env)
            stamp.write_text(identity)

    def kill(self, container: str) -> bool:
        run(*self._ctr("tasks", "kill", "--signal=SIGKILL", container))
        return True

    def stop(self) -> None:
        for name in SERVERS:
            if name == "kubelet" and (RUN / "kubelet.pid").exists():
                self._delete_pods()
            if name == "containerd":
                self._end_containers()
            self._processes.stop(name, mark=RUN.name)
        self._remove_network()
        for mount in sorted(self._mounts(), reverse=True):
            run("umount", "--lazy", mount)
        self._remove_cgroups()
        self._restore()
        for folder in (RUN, STATE):
            shutil.rmtree(folder, ignore_errors=True)

    def leftovers(self) -> list[str]:
        found = [f"process {pid}: {words[:100]}" for pid, words in self._own_processes().items()]
        found += [f"mount {mount}" for mount in self._mounts()]
        found += [f"network link {BRIDGE}"] if Path(f"/sys/class/net/{BRIDGE}").exists() else []
        found += [f"network namespace {name}" for name in self._namespaces()]
        found += [f"iptables: {line}" for line in run("iptables-save").splitlines() if _is_ours(line)][:5]
        found += [f"cgroup {path}" for path in _cgroups()]
        found += [f"folder {folder}" for folder in (RUN, STATE) if folder.exists()]
        return found

    def check(self) -> None:
        """Whether this machine can be a cluster.

        Raises:
            FailedError: it cannot; the message says what to install.
        """
        if os.geteuid() != 0:
            raise FailedError("a cluster of its own needs root: run as root, or install docker and kind")
        packages = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
        packages += [] if (PLUGINS / "bridge").exists() else ["containernetworking-plugins"]
        if packages:
            raise FailedError(f"apt-get install {' '.join(packages)}")
        if self._own_processes():
            return  # of a run that was killed; `stop` ends it
        for address, port in (("127.0.0.1", 10248), ("127.0.0.1", 10249)):
            with socket.socket() as probe:
                if probe.connect_ex((address, port)) == 0:
                    raise FailedError(f"port {port} is taken: another Kubernetes node runs on this machine")

    def _build_programs(self) -> None:
        assert self.tools is not None
        binary = self.tools / "kube"
        if not binary.exists():
            run("sh", Path(__file__).parent / "kubernetes" / "build.sh", binary, seconds=1500)
        for name in (*SERVERS[:-1], "kubectl", "helm"):
            link = self.tools / name
            if not link.exists():
                link.symlink_to(binary.name)

    def _program(self, name: str) -> Path:
        assert self.tools is not None
        return self.tools / name

    def _make_bridge(self) -> None:
        if shutil.which("modprobe"):
            subprocess.run(["modprobe", "--quiet", "br_netfilter"], check=False, timeout=30)
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "address", "add", f"{HOST}/16", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for name in ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"):
            path = Path("/proc/sys") / name
            if path.exists():
                path.write_text("1")
        plugin = {
            "type": "bridge",
            "bridge": BRIDGE,
            "isGateway": True,
            "ipMasq": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "dataDir": str(STATE / "addresses"),
                "ranges": [[{"subnet": PODS}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        network = {"cniVersion": "0.4.0", "name": "e2e", "plugins": [plugin]}
        (RUN / "cni" / "10-e2e.conflist").write_text(json.dumps(network))

    def _make_keys(self) -> None:
        keys = RUN / "keys"
        authority = Authority(keys)
        authority.issue("api", "kube-apiserver", addresses=(HOST, API_SERVICE, "kubernetes.default.svc"))
        authority.issue("service-accounts", "service-accounts")
        authority.issue("admin", "admin", "system:masters")
        authority.issue("kube-controller-manager", "system:kube-controller-manager")
        authority.issue("kube-scheduler", "system:kube-scheduler")
        authority.issue("kubelet", f"system:node:{NODE}", "system:nodes", addresses=(HOST, NODE))
        for user in ("admin", "kube-controller-manager", "kube-scheduler", "kubelet"):
            cluster = {"server": f"https://{HOST}:6443", "certificate-authority": str(authority.certificate)}
            key = {"client-certificate": str(keys / f"{user}.crt"), "client-key": str(keys / f"{user}.key")}
            config = {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "e2e",
                "clusters": [{"name": "e2e", "cluster": cluster}],
                "users": [{"name": user, "user": key}],
                "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": user}}],
            }
            (RUN / f"{user}.kubeconfig").write_text(yaml.safe_dump(config))

    def _start_control_plane(self) -> None:
        keys = RUN / "keys"
        client, peer = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
        self._serve(
            "etcd",
            f"--data-dir={STATE / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--name=default",
            "--unsafe-no-fsync",
        )
        self._serve(
            "kube-apiserver",
            f"--etcd-servers={client}",
            f"--bind-address={HOST}",
            f"--advertise-address={HOST}",
            "--endpoint-reconciler-type=none",
            f"--tls-cert-file={keys / 'api.crt'}",
            f"--tls-private-key-file={keys / 'api.key'}",
            f"--client-ca-file={keys / 'ca.crt'}",
            f"--service-account-key-file={keys / 'service-accounts.key'}",
            f"--service-account-signing-key-file={keys / 'service-accounts.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={SERVICES}",
            "--authorization-mode=Node,RBAC",
            f"--kubelet-client-certificate={keys / 'admin.crt'}",
            f"--kubelet-client-key={keys / 'admin.key'}",
            f"--kubelet-certificate-authority={keys / 'ca.crt'}",
            "--kubelet-preferred-address-types=InternalIP",
        )
        until("the API server is ready", 90, lambda: self._answers("get", "--raw=/readyz"))
        for name in ("kube-controller-manager", "kube-scheduler"):
            config = RUN / f"{name}.kubeconfig"
            common = (
                f"--kubeconfig={config}",
                f"--authentication-kubeconfig={config}",
                f"--authorization-kubeconfig={config}",
                "--leader-elect=false",
                f"--bind-address={HOST}",
            )
            own = (
                f"--service-account-private-key-file={keys / 'service-accounts.key'}",
                f"--root-ca-file={keys / 'ca.crt'}",
                "--use-service-account-credentials",
            )
            self._serve(name, *common, *(own if name == "kube-controller-manager" else ()))

    def _start_node(self) -> None:
        (RUN / "containerd.toml").write_text(
            f"""\
version = 2
root = "{self._images}"
state = "{RUN / "containerd"}"
[grpc]
  address = "{self._socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{STATE / "opt"}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE.tagged}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{PLUGINS}"
    conf_dir = "{RUN / "cni"}"
"""
        )
        self._processes.start("containerd", "containerd", f"--config={RUN / 'containerd.toml'}")
        until("containerd answers", 30, self._containerd_answers)
        keys = RUN / "keys"
        self._configured(
            "kubelet",
            {
                "apiVersion": "kubelet.config.k8s.io/v1beta1",
                "kind": "KubeletConfiguration",
                "address": HOST,
                "authentication": {
                    "anonymous": {"enabled": False},
                    "webhook": {"enabled": True},
                    "x509": {"clientCAFile": str(keys / "ca.crt")},
                },
                "tlsCertFile": str(keys / "kubelet.crt"),
                "tlsPrivateKeyFile": str(keys / "kubelet.key"),
                "cgroupDriver": "cgroupfs",
                "failCgroupV1": False,
                "failSwapOn": False,
                "enforceNodeAllocatable": [],
                "localStorageCapacityIsolation": False,
                "containerRuntimeEndpoint": f"unix://{self._socket}",
                "volumePluginDir": str(STATE / "volume-plugins"),
                "podLogsDir": str(STATE / "logs" / "pods"),
                "clusterDNS": [DNS_SERVICE],
                "clusterDomain": "cluster.local",
                "evictionHard": {"memory.available": "50Mi"},
                "imageGCHighThresholdPercent": 100,
                "oomScoreAdj": 0,
            },
            f"--kubeconfig={RUN / 'kubelet.kubeconfig'}",
            f"--hostname-override={NODE}",
            f"--node-ip={HOST}",
            f"--root-dir={STATE / 'kubelet'}",
        )
        self._configured(
            "kube-proxy",
            {
                "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
                "kind": "KubeProxyConfiguration",
                "clientConnection": {"kubeconfig": str(self.kubeconfig)},
                "mode": "iptables",
                "clusterCIDR": PODS,
                "hostnameOverride": NODE,
                "healthzBindAddress": f"{HOST}:10256",
                "conntrack": {"maxPerCore": 0},
                "oomScoreAdj": 0,
            },
        )

    def _start_dns(self) -> None:
        """CoreDNS runs beside the control plane; pods reach it, and the API server, through services without a selector."""
        (RUN / "Corefile").write_text(
            f"""\
.:{DNS_PORT} {{
    errors
    health {HOST}:10054
    ready {HOST}:10055
    cache 5
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        kubeconfig {self.kubeconfig}
        pods insecure
        ttl 5
    }}
}}
"""
        )
        self._serve("coredns", "-conf", str(RUN / "Corefile"))
        ports = [{"name": p.lower(), "port": DNS_PORT, "protocol": p} for p in ("UDP", "TCP")]
        service_ports = [
            {"name": p["name"], "port": 53, "targetPort": DNS_PORT, "protocol": p["protocol"]} for p in ports
        ]
        dns = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system"},
            "spec": {"clusterIP": DNS_SERVICE, "ports": service_ports},
        }
        api = [{"name": "https", "port": 6443, "protocol": "TCP"}]
        self._apply(dns)
        self._apply(_endpoints("kube-dns", "kube-system", ports))
        self._apply(_endpoints("kubernetes", "default", api))

    def _wait_ready(self) -> None:
        def ready() -> bool:
            self._processes.revive("kubelet", CONTAINERD_STARTS)
            self._processes.must_run()
            condition = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
            return self._kubectl("get", "node", NODE, "-o", condition) == "True"

        until("the node is ready", 90, ready)

    def _delete_pods(self) -> None:
        """So that kubelet ends them and the network plugins clear up behind them."""
        try:
            self._kubectl(
                "delete", "pods", "--all", "--all-namespaces", "--grace-period=1", "--timeout=60s", seconds=70
            )
        except FailedError:
            return  # of a cluster that is half dead; its containers are ended below

    def _end_containers(self) -> None:
        """What kubelet did not end."""
        if self._containerd_answers():
            for task in self._list("tasks"):
                remove = self._ctr("tasks", "rm", "--force", task)
                subprocess.run(remove, check=False, timeout=60, capture_output=True)  # or it ended by itself
            for container in self._list("containers"):
                run(*self._ctr("containers", "rm", container))
        shims = [pid for pid, words in self._own_processes().items() if "containerd-shim" in words]
        for pid in shims:
            os.kill(pid, signal.SIGKILL)
        until("containers have ended", 10, lambda: not any(command_line(pid) for pid in shims))

    def _list(self, what: str) -> list[str]:
        return run(*self._ctr(what, "ls", "--quiet")).split()

    def _remove_network(self) -> None:
        for name in self._namespaces():
            run("umount", "--lazy", Path("/run/netns") / name)
            (Path("/run/netns") / name).unlink()
        if Path(f"/sys/class/net/{BRIDGE}").exists():
            run("ip", "link", "delete", BRIDGE)
        for family in ("iptables", "ip6tables"):
            if shutil.which(f"{family}-save") is None:
                continue
            before = run(f"{family}-save")
            kept = [line for line in before.splitlines(keepends=True) if not _is_ours(line)]
            if len(kept) != len(before.splitlines()):
                run(f"{family}-restore", stdin="".join(kept))

    def _remove_cgroups(self) -> None:
        for path in _cgroups():
            for folder, _, _ in os.walk(path, topdown=False):
                os.rmdir(folder)

    def _remember(self) -> None:
        """What is to be restored: kernel settings, network namespaces, and folders that were not there."""
        settings = {n: p.read_text() for n in SYSCTLS if (p := Path("/proc/sys") / n).exists()}
        names = os.listdir("/run/netns") if Path("/run/netns").exists() else []
        absent = [str(folder) for folder in MADE if not folder.exists()]
        facts = {"sysctls": settings, "namespaces": names, "absent": absent}
        (RUN / "before.json").write_text(json.dumps(facts))

    def _before(self) -> dict[str, object]:
        file = RUN / "before.json"
        found: dict[str, object] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def _restore(self) -> None:
        before = self._before()
        settings = before.get("sysctls", {})
        assert isinstance(settings, dict)
        for name, value in settings.items():
            path = Path("/proc/sys") / name
            if path.read_text() != value:
                path.write_text(value)
        absent = before.get("absent", [])
        assert isinstance(absent, list)
        for folder in absent:
            shutil.rmtree(folder, ignore_errors=True)

    def _namespaces(self) -> list[str]:
        """Of pods: those with a name that the network plugins give, and that were not there before."""
        known = self._before().get("namespaces", [])
        assert isinstance(known, list)
        folder = Path("/run/netns")
        names = os.listdir(folder) if folder.exists() and self._before() else []
        return [name for name in names if name.startswith("cni-") and name not in known]

    def _mounts(self) -> list[str]:
        folders = (str(RUN), str(STATE), str(self._images))
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return [point for point in points if point.startswith(folders)]

    def _own_processes(self) -> dict[int, str]:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
        lines = {pid: command_line(pid) for pid in pids}
        return {pid: words for pid, words in lines.items() if RUN.name in words}

    def _serve(self, name: str, *arguments: str) -> None:
        self._processes.start(name, self._program(name), *arguments)

    def _configured(self, name: str, config: dict[str, object], *arguments: str) -> None:
        path = RUN / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        self._serve(name, f"--config={path}", *arguments)

    def _ctr(self, *arguments: str) -> list[str | Path]:
        return ["ctr", f"--address={self._socket}", "--namespace=k8s.io", *arguments]

    def _containerd_answers(self) -> bool:
        try:
            run(*self._ctr("version"), seconds=5)
        except FailedError:
            return False
        return True

    def _kubectl(self, *arguments: str, stdin: str | None = None, seconds: float = 30) -> str:
        command = (self._program("kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments)
        return run(*command, stdin=stdin, seconds=seconds)

    def _answers(self, *arguments: str) -> bool:
        self._processes.must_run()
        self._kubectl(*arguments)
        return True

    def _apply(self, manifest: dict[str, object]) -> None:
        self._kubectl("apply", "--filename=-", stdin=yaml.safe_dump(manifest))


def _endpoints(service: str, namespace: str, ports: list[dict[str, object]]) -> dict[str, object]:
    """That a service is to be found on this machine."""
    labels = {"kubernetes.io/service-name": service}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": f"{service}-e2e", "namespace": namespace, "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [HOST], "conditions": {"ready": True}}],
        "ports": ports,
    }


def _is_ours(line: str) -> bool:
    """A rule or chain of kube-proxy, kubelet or the bridge plugin."""
    return any(mark in line for mark in (":KUBE-", "-A KUBE-", "-j KUBE-", ":CNI-", "-A CNI-", "-j CNI-"))


def _cgroups() -> list[Path]:
    return sorted(Path("/sys/fs/cgroup").glob("kubepods")) + sorted(Path("/sys/fs/cgroup").glob("*/kubepods"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
