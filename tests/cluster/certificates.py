"""The cluster's certificate authority, its certificates, and the kubeconfigs made from them."""

import base64
import json
from collections.abc import Iterable
from pathlib import Path

from . import addresses
from .addresses import NODES
from .commands import run
from .paths import KUBECONFIG, STATE

PKI = STATE / "pki"
CA = PKI / "ca.crt"
CA_KEY = PKI / "ca.key"
SERVICE_ACCOUNT_KEY = PKI / "service-account.key"
SERVICE_ACCOUNT_PUBLIC = PKI / "service-account.pub"
_DAYS = "3650"


def certificate(name: str) -> Path:
    """Certificate of that name; its key lies beside it."""
    return PKI / f"{name}.crt"


def key(name: str) -> Path:
    """Private key of that name."""
    return PKI / f"{name}.key"


def kubeconfig(name: str) -> Path:
    """Kubeconfig of a component."""
    return PKI / f"{name}.kubeconfig"


def ensure() -> None:
    """Make whatever is missing. They all belong to one authority: a lost one means all anew."""
    if not CA.exists():
        PKI.mkdir(parents=True, exist_ok=True, mode=0o700)
        for stale in PKI.iterdir():
            stale.unlink()
        _new_key(CA_KEY)
        argv = ["openssl", "req", "-x509", "-new", "-key", CA_KEY, "-days", _DAYS, "-subj", "/CN=dp-bed"]
        run([*argv, "-out", _unfinished(CA)])
        _unfinished(CA).rename(CA)
    if not SERVICE_ACCOUNT_PUBLIC.exists():
        _new_key(SERVICE_ACCOUNT_KEY)
        run(["openssl", "pkey", "-in", SERVICE_ACCOUNT_KEY, "-pubout", "-out", _unfinished(SERVICE_ACCOUNT_PUBLIC)])
        _unfinished(SERVICE_ACCOUNT_PUBLIC).rename(SERVICE_ACCOUNT_PUBLIC)
    names = [f"DNS:{name}" for name in ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")]
    own = (addresses.CONTROL_PLANE, addresses.KUBERNETES_SERVICE, "127.0.0.1")
    _issue("apiserver", "/CN=kube-apiserver", [*names, *(f"IP:{address}" for address in own)])
    _issue("apiserver-kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client")
    _issue("front-proxy", "/CN=front-proxy")
    users = {
        "admin": "/O=system:masters/CN=admin",
        "controller-manager": "/CN=system:kube-controller-manager",
        "scheduler": "/CN=system:kube-scheduler",
        "kube-proxy": "/CN=system:kube-proxy",
    }
    for name, subject in users.items():
        _issue(name, subject)
    for node in NODES:
        alternatives = [f"DNS:{node}", f"IP:{addresses.node_address(node)}"]
        _issue(node, f"/O=system:nodes/CN=system:node:{node}", alternatives)
    for name in (*users, *NODES):
        kubeconfig(name).write_text(_kubeconfig(name))
    _hand_over(kubeconfig("admin").read_text())


def _hand_over(text: str) -> None:
    """Leave the administrator's kubeconfig where everything else looks for it."""
    fresh = KUBECONFIG.with_name(".kubeconfig.new")
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    fresh.rename(KUBECONFIG)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _new_key(path: Path) -> None:
    run(["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", path])


def _issue(name: str, subject: str, alternatives: Iterable[str] = ()) -> None:
    """A certificate good for both ends of a connection."""
    target = certificate(name)
    if target.exists():
        return
    _new_key(key(name))
    request = PKI / f".{name}.csr"
    extensions = PKI / f".{name}.ext"
    lines = ["keyUsage=critical,digitalSignature", "extendedKeyUsage=serverAuth,clientAuth"]
    listed = ",".join(alternatives)
    extensions.write_text("\n".join([*lines, f"subjectAltName={listed}" if listed else "", ""]))
    run(["openssl", "req", "-new", "-key", key(name), "-subj", subject, "-out", request])
    argv = ["openssl", "x509", "-req", "-in", request, "-CA", CA, "-CAkey", CA_KEY, "-CAcreateserial"]
    run([*argv, "-days", _DAYS, "-extfile", extensions, "-out", _unfinished(target)])
    _unfinished(target).rename(target)
    request.unlink()
    extensions.unlink()


def _kubeconfig(name: str) -> str:
    """Certificates inside, so that the file can be copied; JSON is YAML too."""

    def data(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    cluster = {"server": addresses.API_URL, "certificate-authority-data": data(CA)}
    user = {"client-certificate-data": data(certificate(name)), "client-key-data": data(key(name))}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "dp-bed", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "dp-bed", "context": {"cluster": "dp-bed", "user": name}}],
        "current-context": "dp-bed",
    }
    return json.dumps(config, indent=1) + "\n"
