"""The control plane: etcd, the API server, the controller manager and the scheduler."""

from __future__ import annotations

from e2e.own_cluster.places import HOST, KEYS, RUN, SERVICES, STATE
from e2e.own_cluster.programs import Programs
from e2e.shell import until
from mmd_cli.local.pods import free_port


def start(programs: Programs) -> None:
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    programs.serve(
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
    programs.serve(
        "kube-apiserver",
        f"--etcd-servers={client}",
        f"--bind-address={HOST}",
        f"--advertise-address={HOST}",
        "--endpoint-reconciler-type=none",
        f"--tls-cert-file={KEYS / 'api.crt'}",
        f"--tls-private-key-file={KEYS / 'api.key'}",
        f"--client-ca-file={KEYS / 'ca.crt'}",
        f"--service-account-key-file={KEYS / 'service-accounts.key'}",
        f"--service-account-signing-key-file={KEYS / 'service-accounts.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-cluster-ip-range={SERVICES}",
        "--authorization-mode=Node,RBAC",
        f"--kubelet-client-certificate={KEYS / 'admin.crt'}",
        f"--kubelet-client-key={KEYS / 'admin.key'}",
        f"--kubelet-certificate-authority={KEYS / 'ca.crt'}",
        "--kubelet-preferred-address-types=InternalIP",
    )
    until("the API server is ready", 90, lambda: programs.answers("get", "--raw=/readyz"))
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
            f"--service-account-private-key-file={KEYS / 'service-accounts.key'}",
            f"--root-ca-file={KEYS / 'ca.crt'}",
            "--use-service-account-credentials",
        )
        programs.serve(name, *common, *(own if name == "kube-controller-manager" else ()))
