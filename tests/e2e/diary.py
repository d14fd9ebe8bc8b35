"""When a deployment came to say what: a watch whose every frame has the time of its arrival."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from tests.e2e.kube import Object, Space


class Entry(NamedTuple):
    """One state of a deployment."""

    at: float  # seconds since the epoch
    deployment: Object

    @property
    def groups(self) -> list[Any]:
        groups: list[Any] = self.deployment.get("status", {}).get("groups", [])
        return groups

    @property
    def generation(self) -> int:
        return int(self.deployment.get("status", {}).get("observedGeneration", 0))

    def condition(self, kind: str) -> Any:
        found = self.deployment.get("status", {}).get("conditions", [])
        return next((condition for condition in found if condition["type"] == kind), {"status": "Unknown"})

    def is_ready(self, *, generation: int = 1) -> bool:
        return self.condition("Ready")["status"] == "True" and self.generation >= generation


class Diary:
    """All states of all deployments of a namespace. Goes on after the API server was away."""

    def __init__(self, space: Space) -> None:
        watch = ("get", "dataparalleldeployments", "--watch", "--output=json")
        self._command = space.cluster.command("--namespace", space.name, *watch)
        self._entries: dict[str, list[Entry]] = {}
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._follow, name=f"diary of {space.name}", daemon=True)

    def __enter__(self) -> Self:
        self._process = self._start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._process.terminate()
        self._thread.join()

    def entries(self, name: str, *, since: float = 0.0) -> list[Entry]:
        with self._news:
            return [entry for entry in self._entries.get(name, []) if entry.at >= since]

    def first(
        self, name: str, what: str, holds: Callable[[Entry], object], *, within_s: float, since: float = 0.0
    ) -> Entry:
        """The first entry since then for which it holds, waited for if need be."""
        deadline = time.monotonic() + within_s
        seen = 0
        while True:
            with self._news:
                known = self._entries.get(name, [])
                for entry in known[seen:]:
                    if entry.at >= since and holds(entry):
                        return entry
                seen = len(known)
                left = deadline - time.monotonic()
                if left <= 0:
                    last = json.dumps(known[-1].deployment.get("status"), indent=1) if known else "nothing"
                    raise AssertionError(f"{name}: {what}: not within {within_s:g} s. Last seen: {last}")
                self._news.wait(min(left, 1.0))

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def _follow(self) -> None:
        while True:
            self._read(self._process)
            self._process.wait()
            if self._closed:
                return
            time.sleep(0.2)
            self._process = self._start()
            if self._closed:  # closed between the two
                self._process.terminate()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout
        decoder, text = json.JSONDecoder(), ""
        characters = codecs.getincrementaldecoder("utf-8")()
        with process.stdout as pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                at = time.time()
                text += characters.decode(chunk)
                with contextlib.suppress(ValueError):  # the rest of the last object comes with the next chunk
                    while text := text.lstrip():
                        deployment, end = decoder.raw_decode(text)
                        text = text[end:]
                        self._note(Entry(at, deployment))

    def _note(self, entry: Entry) -> None:
        with self._news:
            self._entries.setdefault(entry.deployment["metadata"]["name"], []).append(entry)
            self._news.notify_all()
