"""Operator figures on the running cluster: start beside plain objects, API writes of one create, memory.

The plain side makes the very same pods (rendered by the same code, launcher and relay included) by POST, without an
operator; both sides run in turn, in one run, so that the machine's mood cancels out. Writes are counted from the API
server's audit log. Run it on an otherwise idle machine:

    .venv/bin/python -m tests.bench.operator_bench
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from dp_operator import api, naming, render
from dp_operator.client import RESOURCES, ApiError, Client

ROOT = Path(__file__).resolve().parents[2]
KUBECTL = ROOT / ".cluster/bin/kubectl"
AUDIT = ROOT / ".cluster/audit.log"
SERVICE_ACCOUNT = "system:serviceaccount:dp-system:dp-operator"
WRITES = ("create", "update", "patch", "delete")
DEADLINE_S = 180.0

RESOURCES["Namespace"] = ("v1", "namespaces")


class Start(NamedTuple):
    """Seconds from the first request."""

    created: float
    ready: float


def resource(namespace: str, name: str, *, size: int) -> dict[str, Any]:
    return {
        "apiVersion": api.API_VERSION,
        "kind": api.KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"name": "bench/tiny", "architecture": "Dense"},
            "engine": {"image": "localhost/dp-engine:dev", "sharedMemory": "16Mi", "args": ["--load-seconds", "0.2"]},
            "dataParallel": {"size": size},
            "devices": {"assignment": "None"},
            "drain": {"endpointSeconds": 0, "timeoutSeconds": 1},
        },
    }


async def until_ready(client: Client, namespace: str, *, size: int, began: float, key: str | None) -> Start:
    """Poll until all pods exist and the group is ready: the CR's condition with key, the head pod's own without."""
    created = None
    while time.monotonic() - began < DEADLINE_S:
        if created is None:
            pods = await client.list("Pod", namespace=namespace)
            if len(pods) >= size:
                created = time.monotonic() - began
        elif key is None:
            pods = await client.list("Pod", namespace=namespace, selector=f"{naming.LABEL_ROLE}={naming.HEAD}")
            if has_condition(pods[0]):
                return Start(created, time.monotonic() - began)
        elif has_condition(await client.get(api.KIND, namespace, key)):
            return Start(created, time.monotonic() - began)
        await asyncio.sleep(0.1)
    raise SystemExit(f"not ready after {DEADLINE_S} s in namespace {namespace}")


def has_condition(obj: dict[str, Any]) -> bool:
    conditions = obj.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


async def by_operator(client: Client, namespace: str, *, size: int) -> Start:
    began = time.monotonic()
    await client.create(resource(namespace, "bench", size=size))
    return await until_ready(client, namespace, size=size, began=began, key="bench")


async def by_hand(client: Client, namespace: str, *, size: int) -> Start:
    """Make the same objects without the operator: labelled so that it does not see them, owned by nobody."""
    raw = resource(namespace, "bench", size=size)
    raw["metadata"]["uid"] = f"bench-{secrets.token_hex(4)}"
    settings = render.Settings(relay_image="localhost/dp-operator:dev")
    inc = render.Incarnation(cr=api.decode(raw), group=0, id="plain", revision="plain", settings=settings)
    began = time.monotonic()
    service = await client.create(plain(render.rpc_service(inc)))
    config_map = render.config_map(inc, service["spec"]["clusterIP"])
    budget = render.disruption_budget(inc, pods=size)
    await asyncio.gather(*(client.create(plain(m)) for m in (config_map, budget, render.client_service(inc.cr))))
    await asyncio.gather(*(client.create(plain(m)) for m in (render.head_pod(inc), *render.stateful_sets(inc))))
    return await until_ready(client, namespace, size=size, began=began, key=None)


def plain(manifest: dict[str, Any]) -> dict[str, Any]:
    meta = {k: v for k, v in manifest["metadata"].items() if k != "ownerReferences"}
    text = json.dumps(manifest | {"metadata": meta})
    changed: dict[str, Any] = json.loads(text.replace(f'"{naming.MANAGER}"', '"bench"'))
    return changed


async def fresh_namespace(client: Client) -> str:
    name = f"bench-{secrets.token_hex(3)}"
    await client.request("POST", "/api/v1/namespaces", body={"metadata": {"name": name}})
    return name


async def remove_namespace(client: Client, name: str) -> None:
    await client.request("DELETE", f"/api/v1/namespaces/{name}")
    began = time.monotonic()
    while time.monotonic() - began < DEADLINE_S:
        try:
            await client.request("GET", f"/api/v1/namespaces/{name}")
        except ApiError as error:
            if error.status == 404:
                return
            raise
        await asyncio.sleep(0.5)
    raise SystemExit(f"namespace {name} does not go away")


def writes(namespace: str) -> Counter[str]:
    """Writes of the operator in a namespace so far, such as "create pods", from the audit log."""
    found: Counter[str] = Counter()
    with AUDIT.open() as log:
        for line in log:
            if namespace not in line or SERVICE_ACCOUNT not in line:
                continue
            entry = json.loads(line)
            ref = entry.get("objectRef", {})
            if entry["stage"] != "ResponseComplete" or ref.get("namespace") != namespace:
                continue
            if entry["user"]["username"] == SERVICE_ACCOUNT and entry["verb"] in WRITES:
                sub = f"/{ref['subresource']}" if ref.get("subresource") else ""
                found[f"{entry['verb']} {ref['resource']}{sub}"] += 1
    return found


def operator_memory_mib() -> float:
    command = [str(KUBECTL), "-n", "dp-system", "exec", "deploy/dp-operator", "--", "cat", "/proc/1/status"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


async def bench_start(client: Client, *, size: int, rounds: int) -> None:
    sides: dict[str, list[Start]] = {"plain objects": [], "operator": []}
    counted: Counter[str] = Counter()
    for number in range(rounds + 1):
        for side, make in (("plain objects", by_hand), ("operator", by_operator)):
            namespace = await fresh_namespace(client)
            start = await make(client, namespace, size=size)
            if side == "operator":
                await asyncio.sleep(2)  # a late status write belongs to the count
                counted = writes(namespace)
            await remove_namespace(client, namespace)
            if number:  # the first round warms everything up
                sides[side].append(start)
            print(f"  round {number} {side}: created {start.created:.1f} s, ready {start.ready:.1f} s", flush=True)
    print(f"\n| {size} pods, median of {rounds} | all pods created | ready |\n|---|---|---|")
    medians = {}
    for side, starts in sides.items():
        medians[side] = [statistics.median(s[i] for s in starts) for i in (0, 1)]
        print(f"| {side} | {medians[side][0]:.2f} s | {medians[side][1]:.2f} s |")
    ratios = [b / a for a, b in zip(medians["plain objects"], medians["operator"], strict=True)]
    print(f"| ratio | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    status = sum(n for what, n in counted.items() if what.endswith("/status"))
    events = sum(n for what, n in counted.items() if what.endswith("events"))
    print(f"\nAPI writes of one create: {sum(counted.values())} = {sum(counted.values()) - status - events} objects")
    print(f"+ {status} status writes + {events} events: {dict(sorted(counted.items()))}")


async def bench_memory(client: Client, *, objects: int) -> None:
    namespace = await fresh_namespace(client)
    print("\n| DataParallelDeployments, one rank each, ready | operator's memory (RSS) |\n|---|---|")
    for count in (1, objects):
        existing = len(await client.list(api.KIND, namespace=namespace))
        for number in range(existing, count):
            await client.create(resource(namespace, f"one-{number}", size=1))
        began = time.monotonic()
        while time.monotonic() - began < 10 * DEADLINE_S:
            if all(map(has_condition, await client.list(api.KIND, namespace=namespace))):
                break
            await asyncio.sleep(2)
        else:
            raise SystemExit("not all became ready")
        await asyncio.sleep(5)
        print(f"| {count} | {operator_memory_mib():.0f} MiB |", flush=True)
    await remove_namespace(client, namespace)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--objects", type=int, default=50)
    parser.add_argument("--only", choices=["start", "memory"])
    options = parser.parse_args()
    async with Client(user_agent="bench") as client:
        if options.only != "memory":
            await bench_start(client, size=options.size, rounds=options.rounds)
        if options.only != "start":
            await bench_memory(client, objects=options.objects)


if __name__ == "__main__":
    asyncio.run(main())
