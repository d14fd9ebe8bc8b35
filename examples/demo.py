"""The demo: apply examples/quickstart.yaml, watch every rank's way to ready, ask the group, say what to try next.

Standard library and kubectl only, so that it shows nothing that a user could not do by hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KUBECTL = str(ROOT / ".cluster/bin/kubectl")
EXAMPLE = ROOT / "examples/quickstart.yaml"
NAME, NAMESPACE, PORT, SIZE = "quickstart", "default", 8000, 8
DEADLINE_S = 180
STAGES = ("arrived", "connected", "loaded", "ready")
COLOR = sys.stdout.isatty() and "NO_COLOR" not in os.environ


def kubectl(*args: str, check: bool = True) -> str:
    """Run kubectl and return what it prints; its own words on failure."""
    done = subprocess.run([KUBECTL, *args], capture_output=True, text=True, check=False, cwd=ROOT)
    if check and done.returncode:
        sys.exit(f"kubectl {' '.join(args)} failed:\n{done.stderr}")
    return done.stdout


def resource() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kubectl("get", "dpd", NAME, "-o", "json"))
    return found


def paint(text: str, code: int) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if COLOR else text


def ranks(text: str) -> set[int]:
    """Ranks of a range string such as 0-3,7."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def stage_of(rank: int, group: dict[str, Any]) -> str:
    if group.get("state") == "Serving":
        return "ready"
    reached = "pending"
    for stage in STAGES:
        if rank in ranks(group.get("stages", {}).get(stage, "")):
            reached = stage
    return reached


def heading(text: str) -> None:
    print(f"\n{paint(text, 1)}", flush=True)


def show_ranks(started: float) -> None:
    """Print a line whenever a rank or the group's own words change."""
    columns = "".join(f"{'rank ' + str(rank):<11}" for rank in range(SIZE))
    print(f"{'':>6}  {columns}")
    before: tuple[list[str], str] | None = None
    while True:
        status = resource().get("status", {})
        groups = status.get("groups") or [{}]
        stages = [stage_of(rank, groups[-1]) for rank in range(SIZE)]
        words = groups[-1].get("waitingFor", "")
        if (stages, words) != before:
            before = (stages, words)
            colors = {"pending": 31, "arrived": 33, "connected": 33, "loaded": 36, "ready": 32}
            cells = "".join(paint(f"{stage:<11}", colors[stage]) for stage in stages)
            print(f"{time.monotonic() - started:5.1f}s  {cells}", flush=True)
            if words:
                print(f"{'':>8}{paint(words, 2)}", flush=True)
        ready = next((c for c in status.get("conditions", []) if c["type"] == "Ready"), {})
        if ready.get("status") == "True":
            print(f"{'':>8}condition Ready: {ready['message']}")
            return
        if time.monotonic() - started > DEADLINE_S:
            sys.exit(f"not ready after {DEADLINE_S} s; last status:\n{json.dumps(status, indent=2)}")
        time.sleep(0.3)


def show_devices() -> None:
    """Print what each engine container sees."""
    pods = json.loads(kubectl("get", "pods", "-l", f"dataparallel.io/name={NAME}", "-o", "json"))["items"]
    print(f"{'POD':<30}{'NODE':<8}CUDA_VISIBLE_DEVICES (as the container sees it)")
    names = [(pod["metadata"]["name"], pod["spec"]["nodeName"]) for pod in pods]
    ask = ["-c", "engine", "--", "printenv", "CUDA_VISIBLE_DEVICES"]
    with ThreadPoolExecutor(4) as pool:
        seen = pool.map(lambda item: kubectl("exec", item[0], *ask).strip(), names)
        for (name, node), devices in zip(names, seen, strict=True):
            print(f"{name:<30}{node:<8}{devices}")


def proxy(path: str) -> str:
    return f"/api/v1/namespaces/{NAMESPACE}/services/{NAME}:{PORT}/proxy{path}"


def complete(number: int) -> str:
    """Ask for one completion through the API server's proxy to the client Service."""
    body = {"model": "example/tiny", "prompt": f"Question {number}:", "max_tokens": 8}
    done = subprocess.run(
        [KUBECTL, "create", "--raw", proxy("/v1/completions"), "-f", "-"],
        input=json.dumps(body),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"completion {number} failed: {done.stderr}")
    answer: str = json.loads(done.stdout)["choices"][0]["text"]
    return answer


def served() -> dict[int, int]:
    """Finished requests by rank, from vLLM's own metric."""
    counts = dict.fromkeys(range(SIZE), 0)
    for line in kubectl("get", "--raw", proxy("/metrics")).splitlines():
        if line.startswith("vllm:request_success_total{"):
            labels, value = line.rsplit(" ", 1)
            rank = labels.split('engine="')[1].split('"')[0]
            counts[int(rank)] += int(float(value))
    return counts


def main() -> None:
    """Run the demo; exit status 0 means that every rank served."""
    heading(f"Apply examples/{EXAMPLE.name}: one group of {SIZE} ranks, of which 5-7 load slowly")
    kubectl("delete", "dpd", NAME, "--ignore-not-found", "--wait=true")
    kubectl("wait", "--for=delete", "pod", "-l", f"dataparallel.io/name={NAME}", "--timeout=90s")
    kubectl("apply", "-f", str(EXAMPLE))
    started = time.monotonic()
    show_ranks(started)

    heading("What each container sees")
    show_devices()

    heading("Completions through the Service")
    before = served()
    asked = 0
    while asked < 64 and min(after := {r: n - before[r] for r, n in served().items()}.values()) < 1:
        del after
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(complete, range(asked, asked + 8)))
        asked += 8
        print(f"{asked} completions, such as {answers[0]!r}")
    counts = {rank: count - before[rank] for rank, count in served().items()}
    print("served by rank, from /metrics: " + ", ".join(f"{rank}: {count}" for rank, count in counts.items()))
    idle = [rank for rank, count in counts.items() if count < 1]
    if idle:
        sys.exit(f"ranks {idle} served nothing")

    heading("Try next")
    print("  export KUBECONFIG=.cluster/kubeconfig PATH=$PWD/.cluster/bin:$PATH")
    print(f"  kubectl describe dpd {NAME}                  # every condition in words")
    print(f"  kubectl scale dpd {NAME} --replicas 2        # a second group")
    worker = f"dataparallel.io/name={NAME},dataparallel.io/role=worker"
    print(f"  kubectl delete $(kubectl get pods -l {worker} -o name | head -1)")
    print("                                                   # lose a rank: the group is replaced as a whole")


if __name__ == "__main__":
    main()
