"""Examples beside those of the modes (test_every_mode.py): what `make demo` shows, and a real pair as far as CPUs go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.e2e.kube import ENGINE_IMAGE, LABELS, Space

EXAMPLES = Path(__file__).parents[2] / "examples"

# In place of the routing sidecar: port 8000 leads to the engine behind it.
FORWARD = """
import asyncio, os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
async def copy(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def forward(reader, writer):
    there = await asyncio.open_connection("127.0.0.1", 8200)
    await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))
async def main():
    await (await asyncio.start_server(forward, None, 8000)).serve_forever()
asyncio.run(main())
"""


def test_the_quickstart_becomes_ready_as_it_stands(space: Space) -> None:
    document = yaml.safe_load((EXAMPLES / "quickstart.yaml").read_text())
    space.create(document)
    status = space.until_ready("quickstart", within_s=180)
    assert status["ranks"]["summary"] == "8/8"
    assert space.complete("quickstart")["usage"]["completion_tokens"] == 20


def _on_cpus(document: Any) -> Any:
    """Prefill or decode with the stand-in engine: no devices, no KV transfer, one group; everything else stays."""
    spec = document["spec"]
    spec["engine"] |= {"image": ENGINE_IMAGE, "version": "0.32.0", "args": [], "resources": {}, "sharedMemory": "16Mi"}
    spec["engine"]["env"] = [{"name": "DP_ENGINE_VERSION", "value": "0.32.0"}]
    spec |= {"replicas": 1, "devices": {"assignment": "None"}}
    for container in spec["template"].get("spec", {}).get("initContainers", []):
        container |= {"image": ENGINE_IMAGE, "command": ["python3", "-c", FORWARD], "args": []}
    return document


def test_prefill_and_decode_let_each_other_in_and_clients_reach_decode_through_its_sidecar(space: Space) -> None:
    """Ports without authentication are open to the peer only: ModelTC/LightLLM#1413, sglang#24618."""
    documents = list(yaml.safe_load_all((EXAMPLES / "real" / "prefill-decode.yaml").read_text()))
    pair = {d["metadata"]["name"]: d for d in documents if d["kind"] == "DataParallelDeployment"}
    (pool,) = [d["spec"] for d in documents if d["kind"] == "InferencePool"]
    for document in pair.values():
        space.create(_on_cpus(document))
    for name in pair:
        space.until_ready(name)

    labels = ",".join(f"{key}={value}" for key, value in pool["selector"]["matchLabels"].items())
    endpoints = space.find("pods", labels)
    assert sorted(pod["metadata"]["labels"][f"{LABELS}/name"] for pod in endpoints) == sorted(pair)
    for pod in endpoints:
        for port in pool["targetPorts"]:
            done = space.complete_at(pod["metadata"]["name"], port["number"], model="Qwen/Qwen3-32B")
            assert done["usage"]["completion_tokens"] == 20
    assert space.complete("qwen-decode", model="Qwen/Qwen3-32B")["usage"]["completion_tokens"] == 20

    for name, peer in (("qwen-prefill", "qwen-decode"), ("qwen-decode", "qwen-prefill")):
        rules = space.get("networkpolicies", name)["spec"]["ingress"]
        (everything,) = [rule for rule in rules if "ports" not in rule]
        assert {"podSelector": {"matchLabels": {f"{LABELS}/name": peer}}} in everything["from"]
        assert len(everything["from"]) == 2
