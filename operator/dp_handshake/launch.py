"""Start the engine of one pod together with the rest of its group. Standard library only, Python 3.9 or newer.

Mounted beside `plan.json` from the incarnation's ConfigMap, and run in every engine container:

    python3 launch.py                   check in at the monitor, wait for the common release, exec the engine
    python3 -I -S launch.py ready       readinessProbe of a worker: exit code 0 once the monitor has its ranks READY
    python3 launch.py prestop SECONDS   preStop of a worker: wait until the head has ended, at most SECONDS

(-I -S makes the probe start in a fraction of the time; the kubelet runs it every few seconds in every pod.)

The monitor may come up long after this pod: every connect error, timeout, 5xx or unreadable answer means "not yet".
Only the answer "refused" ends the wait without starting the engine: a container that restarts in place would take part
a second time in a handshake that can happen only once.

Environment, given by the operator: DPD_POD_NAME, DPD_POD_IP, DPD_ROLE (head or worker), DPD_WORKER_SET (the
StatefulSet of a worker), DPD_GROUP_DIR (shared with the user's own containers), DPD_TERMINATION_LOG. The engine gets
DPD_HEAD_IP and DPD_START_RANK besides.
"""

# ruff: noqa: PLC0415 - the probe must start fast, so each command imports what it needs
# mypy: disable-error-code="unused-ignore"

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LEAST_PYTHON = (3, 9)
EXIT_REFUSED = 1
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127
EXIT_TERMINATED = 143
FIRST_WAIT_S = 0.0  # the first answer comes at once, so that the log says soon whom this pod waits for
WAIT_S = 10.0
SAY_EVERY_S = 10.0
PROBE_TIMEOUT_S = 2.0
TELL_FOR_S = 10.0
PRESTOP_CONNECT_S = 1.3  # a packet that was lost is sent again after a second
PRESTOP_AGAIN_S = 0.5


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


def devices_here(visible: str | None, environ: dict[str, str]) -> int | None:
    """Count the accelerators of this container: by the engine's variable, the NVIDIA runtime's, or device files."""
    counted = device_count(visible)
    if counted is None:
        counted = device_count(environ.get("NVIDIA_VISIBLE_DEVICES"))
    if counted is None:
        try:
            names = os.listdir("/dev")
        except OSError:
            return None
        counted = len([name for name in names if name.startswith("nvidia") and name[6:].isdigit()]) or None
    return counted


def remove_stale_segments(directory: str = "/dev/shm") -> int:  # noqa: S108
    """Remove shared memory that an engine left behind when it was killed; /dev/shm is this pod's own volume.

    Only names that Python's multiprocessing, PyTorch and NCCL give, and only our own files.
    """
    removed = 0
    try:
        names = os.listdir(directory)
    except OSError:
        return 0
    for name in names:
        path = os.path.join(directory, name)
        if not name.startswith(("psm_", "sem.mp-", "torch_", "nccl-")):
            continue
        try:
            if os.lstat(path).st_uid == os.getuid():
                os.unlink(path)
                removed += 1
        except OSError:
            pass
    return removed


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
    needed = int(plan.get("headDevices" if role == "head" else "workerDevices") or 0)
    devices = devices_here(visible, environ) if needed else device_count(visible)
    memory = shared_memory_bytes()
    wanted = int(plan.get("sharedMemoryBytes") or 0) * max(1, ranks)
    warnings = []
    if needed and devices is not None and devices > needed:
        warnings.append(f"{devices} devices are visible, {needed} are needed")
    if memory is not None and memory < wanted:
        # A tmpfs is no larger than the pod's memory limit allows.
        warnings.append(
            f"shared memory: {memory // 2**20} MiB of {wanted // 2**20} MiB in /dev/shm: is the memory limit too low?"
        )
    found: dict[str, Any] = {
        "incarnation": plan["incarnation"],
        "pod": pod,
        "ip": environ["DPD_POD_IP"],
        "launch": os.urandom(8).hex(),
        "role": role,
        "firstRank": first,
        "ranks": ranks,
        "visibleDevices": visible,
        "deviceCount": devices,
        "sharedMemoryBytes": memory,
        "engineVersion": installed_version(),
        "pythonVersion": "{}.{}.{}".format(*sys.version_info),
        "warnings": warnings or None,
    }
    return {key: value for key, value in found.items() if value is not None}


def obstacle(plan: dict[str, Any], found: dict[str, Any]) -> str:
    """Say why this engine cannot run, in one line; empty if nothing is known to be wrong."""
    needed = int(plan.get("headDevices" if found["role"] == "head" else "workerDevices") or 0)
    devices, version, least = found.get("deviceCount"), found.get("engineVersion"), plan.get("needsVersion") or None
    if needed and devices is not None and devices < needed:
        seen = (
            f" ({plan.get('visibleDevicesEnvName')}={found['visibleDevices']})" if found.get("visibleDevices") else ""
        )
        return (
            f"{devices} devices are visible{seen}, but {found['ranks']} ranks here need {needed}: "
            "does the node give this container all of them?"
        )
    if version and least and not within(version, least, None):
        return f"the image has vLLM {version}, and {plan.get('needsVersionFor')} needs {least} or newer"
    return ""


def address_obstacle(own: str, head: str) -> str:
    """Say why this pod cannot reach the head, from the two addresses alone; empty if it can."""
    if (":" in own) != (":" in head):
        return (
            f"the head's address is {head} and this pod's is {own}: one is IPv6 and one IPv4. "
            "Are the nodes' address families ordered differently?"
        )
    return ""


def clean_environment() -> list[str]:
    """Undo what a Service named vllm does to its neighbours; service links put its address into VLLM_PORT."""
    port = os.environ.get("VLLM_PORT", "")
    if "://" in port:
        del os.environ["VLLM_PORT"]
        return [f"VLLM_PORT={port} removed: a Service named vllm put it there, and vLLM would end"]
    return []


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


def tell(address: tuple[str, int], check_in: dict[str, Any]) -> None:
    """Check in without waiting, for the facts alone: the operator shows them. Gives up after TELL_FOR_S."""
    import time

    end = time.monotonic() + TELL_FOR_S
    while ask(address, check_in, 0.0)[0] is None and time.monotonic() < end:
        time.sleep(0.5)


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
    role, installed = check_in["role"], check_in.get("engineVersion") or plan.get("assumedVersion")
    # Only as the first process of a container is the launcher sure that nobody uses them.
    stale = remove_stale_segments() if os.getpid() == 1 else 0
    for text in [
        *check_in.get("warnings", []),
        *clean_environment(),
        *([f"{stale} stale segments removed from /dev/shm"] if stale else []),
    ]:
        say(text)
    wrong = obstacle(plan, check_in)
    if wrong:
        tell(monitor_address(plan, role), dict(check_in, warnings=[wrong, *check_in.get("warnings", [])]))
        return fail(f"not started: {wrong}", EXIT_REFUSED)
    answer = wait_for_release(monitor_address(plan, role), check_in)
    if answer["state"] == "refused":
        reason = answer.get("message") or "refused by the monitor"
        return fail(f"not started: {reason}", EXIT_REFUSED)
    head_ip = str(answer.get("headIp"))
    wrong = address_obstacle(check_in["ip"], head_ip)
    if wrong:
        return fail(f"not started: {wrong}", EXIT_REFUSED)
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
    os.environ["DPD_START_RANK"] = str(check_in["firstRank"])
    tell_neighbours(os.environ.get("DPD_GROUP_DIR", ""), head_ip=head_ip, start_rank=check_in["firstRank"])
    line = " ".join(shlex.quote(item) for item in argv)
    say(f"engine {installed or 'of unknown version'}, {check_in['ranks']} ranks from {check_in['firstRank']}: {line}")
    try:
        os.execvp(command, argv)  # noqa: S606 - no shell is the point
    except FileNotFoundError:
        return fail(f"{command}: command not found in the image", EXIT_NOT_FOUND)
    except OSError as error:
        return fail(f"{command}: {error.strerror}", EXIT_CANNOT_EXECUTE)


def tell_neighbours(directory: str, *, head_ip: str, start_rank: int) -> None:
    """Leave a file `env` for containers of the user's own: it appears with the release, and all at once."""
    if not directory:
        return
    path = os.path.join(directory, "env")
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            file.write(f"DPD_HEAD_IP={head_ip}\nDPD_START_RANK={start_rank}\n")
        os.rename(path + ".tmp", path)
    except OSError as error:
        say(f"{path} cannot be written: {error.strerror}")


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
    """Wait until the head has ended, so that a worker does not end before the requests that it works on.

    The head's API is no sign of that: vLLM closes its port first and then lets requests finish, among them some that no
    rank has heard of yet. The monitor is a sidecar, which the kubelet stops once the engine has ended.
    """
    import select
    import socket
    import time

    end = time.monotonic() + seconds
    head = remembered_head()
    if not head:
        return 0  # never released: there is no engine to protect
    _, port = monitor_address(read_plan(), "worker")
    failures = 0
    while failures < 2 and time.monotonic() < end:
        pause_s = min(0.5, max(0.0, end - time.monotonic()))
        try:
            limit_s = PRESTOP_AGAIN_S if failures else PRESTOP_CONNECT_S
            with socket.create_connection((head, port), timeout=limit_s) as connection:
                failures = 0
                # Open until the next look: it tells the end of the monitor, whose address may be gone a moment later,
                # and there nobody refuses a connection.
                if select.select([connection], [], [], pause_s)[0]:
                    failures, pause_s = 1, 0.1
                else:
                    pause_s = 0.0
        except socket.timeout:  # noqa: UP041 - of its own kind before Python 3.10
            # Nobody says no: the head's address is gone, or its node; or packets were lost, and a short look tells.
            failures, pause_s = failures + 1, 0.0
        except OSError:
            failures += 1
        time.sleep(pause_s)
    return 0


def main(argv: list[str]) -> int:
    """Run one of the three commands; gives the exit code."""
    if sys.version_info[:2] < LEAST_PYTHON:
        found, least = ("{}.{}".format(*version) for version in (sys.version_info, LEAST_PYTHON))
        return fail(
            f"not started: python3 of the image is Python {found}, and {least} or newer is needed", EXIT_REFUSED
        )
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
