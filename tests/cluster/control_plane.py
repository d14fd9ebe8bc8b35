"""etcd, apiserver, controller-manager and scheduler, in the control plane's namespace."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from . import addresses, api, processes
from .certificates import CA, CA_KEY, SERVICE_ACCOUNT_KEY, SERVICE_ACCOUNT_PUBLIC, certificate, key, kubeconfig
from .console import wait_until
from .errors import BedError
from .network import CONTROL_PLANE, inside
from .paths import AUDIT_LOG, STATE

NAMES = ("etcd", "apiserver", "controller-manager", "scheduler")
READY_S = 90.0


def command_lines(binaries: Mapping[str, Path]) -> dict[str, list[str]]:
    """Full command line of each process."""
    argv = {
        "etcd": [binaries["etcd"], *_etcd()],
        "apiserver": [binaries["kube-apiserver"], *_apiserver()],
        "controller-manager": [binaries["kube-controller-manager"], *_controller_manager()],
        "scheduler": [binaries["kube-scheduler"], *_scheduler()],
    }
    return {name: inside(CONTROL_PLANE, words) for name, words in argv.items()}


def ensure(binaries: Mapping[str, Path]) -> None:
    """Start what does not run; the other two only once the apiserver is ready, they give up otherwise."""
    lines = command_lines(binaries)
    _audit_policy().write_text(json.dumps(_AUDIT))
    processes.ensure("etcd", lines["etcd"])
    processes.ensure("apiserver", lines["apiserver"])
    wait_ready()
    processes.ensure("controller-manager", lines["controller-manager"])
    processes.ensure("scheduler", lines["scheduler"])


def wait_ready() -> None:
    """Until the apiserver says that it is ready."""
    ready = alive_and("apiserver", lambda: api.missing("/readyz"))
    wait_until("the apiserver to be ready", alive_and("etcd", ready), READY_S)


def alive_and(name: str, seen: Callable[[], str | None]) -> Callable[[], str | None]:
    """The same condition, given up at once when the process it depends on has died."""

    def check() -> str | None:
        if not processes.running(name):
            raise BedError(f"{name} has ended. The end of {processes.log_path(name)}:\n{processes.log_tail(name)}")
        return seen()

    return check


def ensure_cluster_objects() -> None:
    """What pods need before they can start: the default service account, and a DNS address that answers at once.

    The bed has no DNS. A Service without endpoints refuses a query immediately; an address that nobody has would
    let every look-up wait ten seconds.
    """
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system"},
        "spec": {"clusterIP": addresses.DNS_SERVICE, "ports": [{"name": "dns", "port": 53, "protocol": "UDP"}]},
    }
    status, answer = api.request("POST", "/api/v1/namespaces/kube-system/services", service)
    if status not in (201, 409, 422):  # 422: the address is taken, by the Service of an earlier start
        raise BedError(f"Cannot create the Service kube-system/kube-dns: HTTP {status} {answer}")
    path = "/api/v1/namespaces/default/serviceaccounts/default"
    seen = alive_and("controller-manager", lambda: api.missing(path))
    wait_until("the default service account", seen, READY_S)


# Who called what, not with which content. One line per call: the stage at which a request arrives is left out.
_AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


def _audit_policy() -> Path:
    return STATE / "audit-policy.json"


def _etcd() -> list[str]:
    return [
        f"--data-dir={STATE / 'etcd'}",
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--initial-advertise-peer-urls=http://127.0.0.1:2380",
        "--initial-cluster=default=http://127.0.0.1:2380",
        "--unsafe-no-fsync",  # a bed that loses its last second in a power cut is no loss
    ]


def _apiserver() -> list[str]:
    return [
        "--etcd-servers=http://127.0.0.1:2379",
        "--bind-address=0.0.0.0",
        f"--advertise-address={addresses.CONTROL_PLANE}",
        f"--secure-port={addresses.API_PORT}",
        f"--service-cluster-ip-range={addresses.SERVICES}",
        f"--tls-cert-file={certificate('apiserver')}",
        f"--tls-private-key-file={key('apiserver')}",
        f"--client-ca-file={CA}",
        f"--kubelet-certificate-authority={CA}",
        f"--kubelet-client-certificate={certificate('apiserver-kubelet-client')}",
        f"--kubelet-client-key={key('apiserver-kubelet-client')}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--requestheader-client-ca-file={CA}",
        # The same authority signs everybody: without this any client could name itself as any user.
        "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={certificate('front-proxy')}",
        f"--proxy-client-key-file={key('front-proxy')}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={SERVICE_ACCOUNT_PUBLIC}",
        f"--service-account-signing-key-file={SERVICE_ACCOUNT_KEY}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--audit-policy-file={_audit_policy()}",
        f"--audit-log-path={AUDIT_LOG}",
        "--audit-log-maxsize=1000",  # in MB: tests count lines, so it must not be cut off under them
        "--audit-log-maxbackup=1",
    ]


def _controller_manager() -> list[str]:
    own = kubeconfig("controller-manager")
    return [
        f"--kubeconfig={own}",
        f"--authentication-kubeconfig={own}",
        f"--authorization-kubeconfig={own}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={SERVICE_ACCOUNT_KEY}",
        f"--root-ca-file={CA}",
        f"--cluster-signing-cert-file={CA}",
        f"--cluster-signing-key-file={CA_KEY}",
        "--kube-api-qps=100",
        "--kube-api-burst=200",
        # A lost node is noticed in 16 s instead of 50.
        "--node-monitor-grace-period=16s",
        "--node-monitor-period=2s",
    ]


def _scheduler() -> list[str]:
    own = kubeconfig("scheduler")
    return [
        f"--kubeconfig={own}",
        f"--authentication-kubeconfig={own}",
        f"--authorization-kubeconfig={own}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
    ]
