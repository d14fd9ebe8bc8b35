"""Start the engine of one pod together with the rest of its group. Standard library only, Python 3.9 or newer.

Mounted beside `plan.json` from the incarnation's ConfigMap, and run in every engine container:

    python3 launch.py                   check in at the monitor, wait for the common release, exec the engine
    python3 -I -S launch.py ready       readinessProbe of a worker: exit code 0 once the monitor has its ranks READY
    python3 launch.py prestop SECONDS   preStop of a worker: wait until the head's API is gone, at most SECONDS

(-I -S makes the probe start in a fraction of the time; the kubelet runs it every few seconds in every pod.)

The monitor may come up long after this pod: every connect error, timeout, 5xx or unreadable answer means "not yet".
Only the answer "refused" ends the wait without starting the engine: a container that restarts in place would take part
a second time in a handshake that can happen only once.

Environment, given by the operator: DPD_POD_NAME, DPD_POD_IP, DPD_ROLE (head or worker), DPD_WORKER_SET (the
StatefulSet of a worker), DPD_TERMINATION_LOG.
"""

# ruff: noqa: PLC0415 - the probe must start fast, so each command imports what it needs
# mypy: disable-error-code="unused-ignore"

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EXIT_REFUSED = 1
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127
EXIT_TERMINATED = 143
FIRST_WAIT_S = 0.0  # the first answer comes at once, so that the log says soon whom this pod waits for
WAIT_S = 10.0
SAY_EVERY_S = 10.0
PROBE_TIMEOUT_S = 2.0


def read_plan() -> dict[str, Any]:
    """Read the launch plan that lies beside this file."""
    import json

    directory = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(directory, "plan.json"), encoding="utf-8") as file:
        plan: dict[str, Any] = json.load(file)
    return plan


def monitor_address(plan: dict[str, Any], role: str) -> tuple[str, int]:
    """Give the monitor's host and port: the head's is in the same pod."""
    host = "127.0.0.1" if role == "head" else str(plan["monitorHost"])
    return host, int(plan.get("monitorPort", 13350))


def first_rank(plan: dict[str, Any], *, role: str, pod: str, worker_set: str) -> tuple[int, int]:
    """Give the first global rank of this pod and the number of its ranks. Raises ValueError if the plan lacks it."""
    local = int(plan["sizeLocal"])
    if role == "head":
        return 0, local if plan["headPlacement"] == "Colocated" else 0
    ordinal = pod.rpartition("-")[2]
    if not ordinal.isdigit():
        raise ValueError(f"pod name {pod!r} does not end in an ordinal")
    for workers in plan["workers"]:
        if workers["name"] == worker_set:
            return int(workers["firstRank"]) + int(workers["rankStride"]) * int(ordinal), local
    raise ValueError(f"worker set {worker_set!r} is not in the launch plan")


def version_key(text: str) -> tuple[int, ...] | None:
    """Turn "0.18.0rc1.post2+cpu" into (0, 18, 0); None if it is no version.

    Only the release counts: a release candidate or nightly build has the flags of the release that it leads to.
    """
    import re

    match = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    return tuple(int(part) for part in match.group(1).split(".")) if match else None


def within(installed: str | None, since: str | None, until: str | None) -> bool:
    """Tell whether since <= installed < until; an unknown version is within everything."""
    key = version_key(installed) if installed else None
    if key is None:
        return True
    return _compare(key, since) >= 0 and (until is None or _compare(key, until) < 0)


def _compare(key: tuple[int, ...], bound: str | None) -> int:
    other = version_key(bound) if bound else None
    if other is None:
        return 0
    length = max(len(key), len(other))
    left = key + (0,) * (length - len(key))
    right = other + (0,) * (length - len(other))
    return (left > right) - (left < right)


def resolve(items: list[Any], *, fills: dict[str, str], installed: str | None) -> list[str]:
    """Turn the plan's argv into strings. Raises ValueError on an item that this launcher does not know."""
    argv: list[str] = []
    for item in items:
        if isinstance(item, str):
            argv.append(item)
        elif isinstance(item, dict) and "fill" in item:
            if item["fill"] not in fills:
                raise ValueError(f"unknown fill {item['fill']!r} in the launch plan")
            argv.append(fills[item["fill"]])
        elif isinstance(item, dict) and "items" in item:
            if within(installed, item.get("since"), item.get("until")):
                argv.extend(resolve(item["items"], fills=fills, installed=installed))
        else:
            raise ValueError(f"unknown item {item!r} in the launch plan")
    return argv


def installed_version() -> str | None:
    """Find the engine's version without importing it; the stand-in engine's image names the one that it plays."""
    from importlib import metadata

    try:
        return metadata.version("vllm")
    except Exception:
        # PackageNotFoundError, or whatever damaged metadata brings: the operator's own idea of the version then counts.
        return os.environ.get("DP_ENGINE_VERSION") or None


def device_count(visible: str | None) -> int | None:
    """Count the devices of a list such as "0,1" or "GPU-…"; None if the variable does not say."""
    if visible is None or visible.strip().lower() in ("", "all", "none", "void"):
        return None
    return len([item for item in visible.split(",") if item.strip()])


def shared_memory_bytes() -> int | None:
    try:
        info = os.statvfs("/dev/shm")  # noqa: S108 - its size is what is asked
    except OSError:
        return None
    return info.f_frsize * info.f_blocks


def preflight(plan: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
    """Collect what the monitor is told about this pod beyond its name. Raises ValueError and KeyError."""
    role, pod = environ["DPD_ROLE"], environ["DPD_POD_NAME"]
    first, ranks = first_rank(plan, role=role, pod=pod, worker_set=environ.get("DPD_WORKER_SET", ""))
    name = plan.get("visibleDevicesEnvName") or ""
    visible = environ.get(name) if name else None
    found = {
        "incarnation": plan["incarnation"],
        "pod": pod,
        "ip": environ["DPD_POD_IP"],
        "launch": os.urandom(8).hex(),
        "role": role,
        "firstRank": first,
        "ranks": ranks,
        "visibleDevices": visible,
        "deviceCount": device_count(visible),
        "sharedMemoryBytes": shared_memory_bytes(),
        "engineVersion": installed_version(),
    }
    return {key: value for key, value in found.items() if value is not None}


def ask(address: tuple[str, int], check_in: dict[str, Any], wait_s: float) -> tuple[dict[str, Any] | None, str]:
    """Check in once. Gives the monitor's answer, or None and what stood in its way."""
    import http.client
    import json

    body = json.dumps(dict(check_in, waitSeconds=wait_s))
    connection = http.client.HTTPConnection(address[0], address[1], timeout=wait_s + 5)
    try:
        connection.request("POST", "/v1/check-in", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read(65536)
        status = response.status
    except (OSError, http.client.HTTPException, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    try:
        answer = json.loads(data.decode("utf-8"))
    except ValueError:
        answer = None
    known = ("waiting", "released", "refused")
    if status not in (200, 409) or not isinstance(answer, dict) or answer.get("state") not in known:
        text = data[:200].decode("utf-8", "replace").strip()
        return None, f"status {status}: {text}"
    if answer["state"] == "released" and not answer.get("headIp"):
        return None, "released without the head's address"
    return answer, ""


def wait_for_release(address: tuple[str, int], check_in: dict[str, Any]) -> dict[str, Any]:
    """Ask until the monitor has released or refused this pod."""
    import random
    import time

    said, said_at, pause_s, wait_s = "", 0.0, 0.2, FIRST_WAIT_S
    heard = False
    while True:
        answer, trouble = ask(address, check_in, wait_s)
        if answer is not None and answer["state"] != "waiting":
            return answer
        now = time.monotonic()
        due = not said or now - said_at >= SAY_EVERY_S
        if answer is None:
            text = f"the monitor at {address[0]} port {address[1]} does not answer yet ({trouble})"
        else:
            text = str(answer.get("message") or "waiting for the other pods of the group")
            due = due or not heard
            heard, wait_s, pause_s = True, WAIT_S, 0.2
        if due and text != said:
            say(text)
            said, said_at = text, now
        if answer is None:
            time.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
            pause_s = min(1.0, pause_s * 1.5)


def say(text: str) -> None:
    sys.stdout.write(f"launch: {text}\n")
    sys.stdout.flush()


def fail(text: str, code: int) -> int:
    """Leave the reason where the operator and people look for it."""
    sys.stderr.write(f"launch: {text}\n")
    sys.stderr.flush()
    try:
        with open(os.environ.get("DPD_TERMINATION_LOG", "/dev/termination-log"), "w", encoding="utf-8") as file:
            file.write(text[:4000] + "\n")
    except OSError:
        pass
    return code


def head_file() -> str:
    """Name the file that keeps the head's address for preStop."""
    import tempfile

    return os.path.join(tempfile.gettempdir(), "dpd-head-ip")


def launch() -> int:
    """Wait for the release, then become the engine. Returns only when there is no engine to become."""
    import shlex
    import signal

    # The first process of a container ignores a signal that it has no handler for.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_TERMINATED))
    try:
        plan = read_plan()
        check_in = preflight(plan, dict(os.environ))
    except (OSError, KeyError, ValueError) as error:
        return fail(f"cannot start: {type(error).__name__}: {error}", EXIT_REFUSED)
    role, installed = check_in["role"], check_in.get("engineVersion")
    answer = wait_for_release(monitor_address(plan, role), check_in)
    if answer["state"] == "refused":
        reason = answer.get("message") or "refused by the monitor"
        return fail(f"not started: {reason}", EXIT_REFUSED)
    head_ip = str(answer.get("headIp"))
    fills = {"headIP": head_ip, "startRank": str(check_in["firstRank"])}
    try:
        argv = resolve(plan["headArgv" if role == "head" else "workerArgv"], fills=fills, installed=installed)
        command = argv[0]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return fail(f"cannot start: {type(error).__name__}: {error}", EXIT_REFUSED)
    try:
        with open(head_file(), "w", encoding="utf-8") as file:
            file.write(head_ip)
    except OSError:
        pass  # a read-only file system: preStop then reads the environment
    os.environ["DPD_HEAD_IP"] = head_ip
    line = " ".join(shlex.quote(item) for item in argv)
    say(f"engine {installed or 'of unknown version'}, {check_in['ranks']} ranks from {check_in['firstRank']}: {line}")
    try:
        os.execvp(command, argv)  # noqa: S606 - no shell is the point
    except FileNotFoundError:
        return fail(f"{command}: command not found in the image", EXIT_NOT_FOUND)
    except OSError as error:
        return fail(f"{command}: {error.strerror}", EXIT_CANNOT_EXECUTE)


def http_get(address: tuple[str, int], path: str) -> tuple[int, str]:
    """Fetch by hand: http.client alone would triple the time that the probe takes. Raises OSError and ValueError."""
    import socket

    with socket.create_connection(address, timeout=PROBE_TIMEOUT_S) as connection:
        connection.sendall((f"GET {path} HTTP/1.0\r\nHost: monitor\r\nConnection: close\r\n\r\n").encode())
        data = b""
        while len(data) < 65536:
            part = connection.recv(4096)
            if not part:
                break
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise ValueError("not an HTTP answer")
    return int(words[1]), body.decode("utf-8", "replace").strip()


def ready() -> int:
    """Ask the monitor whether the ranks of this pod are READY; the reason goes to the probe's event."""
    try:
        address = monitor_address(read_plan(), os.environ.get("DPD_ROLE", "worker"))
        status, text = http_get(address, "/v1/ready/" + os.environ["DPD_POD_NAME"])
    except (OSError, ValueError, KeyError) as error:
        status, text = 0, f"the monitor does not answer: {error}"
    print(text.splitlines()[0] if text else f"status {status}")
    return 0 if status == 200 else 1


def remembered_head() -> str:
    """Find the head's address: in the launcher's file, else in the environment of the engine."""
    try:
        with open(head_file(), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        pass
    try:
        with open("/proc/1/environ", "rb") as file:
            for entry in file.read().split(b"\0"):
                name, _, value = entry.partition(b"=")
                if name == b"DPD_HEAD_IP":
                    return value.decode()
    except OSError:
        pass
    return ""


def prestop(seconds: float) -> int:
    """Wait until the head's API is gone, so that a worker does not end before the requests that it works on."""
    import socket
    import time

    end = time.monotonic() + seconds
    head = remembered_head()
    if not head:
        return 0  # never released: there is no engine to protect
    port = int(read_plan()["apiPort"])
    failures = 0
    while time.monotonic() < end:
        try:
            socket.create_connection((head, port), timeout=2).close()
            failures = 0
        except OSError:
            failures += 1
            if failures == 2:
                return 0
        time.sleep(min(0.5, max(0.0, end - time.monotonic())))
    return 0


def main(argv: list[str]) -> int:
    """Run one of the three commands; gives the exit code."""
    if not argv:
        return launch()
    if argv == ["ready"]:
        return ready()
    if len(argv) == 2 and argv[0] == "prestop":
        return prestop(float(argv[1]))
    sys.stderr.write("usage: launch.py [ready | prestop SECONDS]\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
