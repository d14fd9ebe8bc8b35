"""What a log says about why an engine ended. Pure.

The last lines of an engine's log often only say that a worker died and that the root cause is further up, so two parts
are kept: the first lines of the errors that the log ends with, and the tail. What an engine has survived explains
nothing: errors further up count only where the last ones point at them. A reason is derived only where the text is
unmistakable.
"""

from __future__ import annotations

import re
from itertools import pairwise

FIRST_ERROR_MAX = 1024
TAIL_MAX = 2048
_ERROR_BLOCK_LINES = 12
# Errors with no more than this between them are one burst: several processes end at once and write in turn.
_GAP_LINES = 10
_NEAR_THE_END_LINES = 200

# Most specific first: an engine that finds no memory for its cache also reports how much of the GPU was free.
_REASONS = (
    (
        "ModelAccessDenied",
        (
            r"GatedRepoError|RepositoryNotFoundError|Access to model \S+ is restricted|"
            r"40[13] Client Error: \S+ for url: \S*(huggingface|modelscope)|Cannot access gated repo"
        ),
    ),
    ("DiskFull", r"No space left on device|Disk quota exceeded|Not enough disk space"),
    (
        "NoKVCacheMemory",
        (
            r"No available memory for the cache blocks|larger than the available KV cache memory|"
            r"larger than the maximum number of tokens that can be stored in KV cache"
        ),
    ),
    (
        "GPUOutOfMemory",
        r"(CUDA|HIP|XPU|NPU) out of memory|OutOfMemoryError|less than desired GPU memory utilization",
    ),
    (
        "CollectiveTimeout",
        (
            r"Watchdog caught collective operation timeout|"
            r"(NCCL|RCCL|HCCL|[Gg]loo|ProcessGroup\w*|collective operation).{0,200}[Tt]imed out|"
            r"[Tt]imed out.{0,80}(all_?reduce|barrier|broadcast)"
        ),
    ),
    (
        "ArgumentsRejected",
        (
            r"error: (unrecognized arguments|argument |the following arguments|ambiguous option)|"
            r"pydantic_core\.\S*ValidationError.*(ParallelConfig|ModelConfig|VllmConfig|EngineArgs)"
        ),
    ),
)
_COMPILED = tuple((reason, re.compile(pattern)) for reason, pattern in _REASONS)
_TOO_OLD = re.compile(r"^not started: the image has vLLM (\S{1,32}), and ")
_ERROR = re.compile(
    r"Traceback \(most recent call last\)|\b(ERROR|CRITICAL|FATAL)\b|\w*(Error|Exception)\b: |\berror: |"
    r"\[[EF]\d{4} "  # as glog writes
)
# vLLM puts the process before the level. The launcher, which comes first, also repeats the whole command.
_HARMLESS = re.compile(r"^(\([^)]*\) *)*(DEBUG|INFO|WARNING|WARN)\b|^launch: | - (DEBUG|INFO|WARNING) - |\[[IW]\d{4} ")
# By words, or because it is how a process ends that others have ended with.
_POINTS_UP = re.compile(r"root cause|Engine core initialization failed|\b(CancelledError|KeyboardInterrupt)\b")
# How an engine ends because another has, in a collective; and how the front end does that watches an engine.
_OF_A_PEER = re.compile(
    r"([Gg]loo|ProcessGroup|NCCL|RCCL|HCCL|TCPStore|c10d).{0,300}"
    r"(Connection (was )?(closed|reset) by (remote )?peer|[Bb]roken pipe|remote process (has )?exit)|"
    r"a remote process exiting"
)
_OF_AN_ENGINE = re.compile(r"EngineDeadError")
# What a launcher or an executor says of a process of its own, whatever that died of.
_DIED = re.compile(r"\bdied unexpectedly\b")
_AGAIN = re.compile(r"^not started: pod \S+ started again ")
_FRAME = re.compile(r"^(\([^)]*\))?\s{2,}\S")


def reason(text: str) -> str:
    """The cause in one word where the errors at the log's end are clear about it, "" otherwise."""
    errors = "\n".join(line for burst in _last_bursts(text.splitlines()) for line in burst)
    return next((name for name, pattern in _COMPILED if pattern.search(errors)), "")


def version_too_old(text: str) -> str:
    """The vLLM version in the image, where a launcher says that it is too old for what is asked; "" otherwise."""
    found = _TOO_OLD.search(text)
    return found.group(1) if found else ""


def first_error(text: str) -> str:
    """The first lines of the errors that a log ends with, at most FIRST_ERROR_MAX characters; "" where it has none."""
    bursts = _last_bursts(text.splitlines())
    if not bursts:
        return ""
    lines = bursts[0]
    named = [n for n, line in enumerate(lines) if _ERROR.search(line) or _POINTS_UP.search(line)]
    start = next((n for n in named if not _POINTS_UP.search(lines[n])), named[0])
    traceback = next((n for n in range(start, min(start + 3, len(lines))) if "Traceback (most" in lines[n]), None)
    if traceback is None:
        block = lines[start : start + _ERROR_BLOCK_LINES]
    else:
        # The frames say less than the exception below them.
        end = next((n for n in range(traceback + 1, len(lines)) if _ends_traceback(lines[n])), traceback)
        block = [*lines[start : traceback + 1], *lines[max(traceback + 1, end - 4) : end + 3]]
    return "\n".join(block)[:FIRST_ERROR_MAX]


def _last_bursts(lines: list[str]) -> list[list[str]]:
    """The errors that a log ends with, and those above that they point at, in the log's order; none if long past."""
    marked: list[int] = []
    for n, line in enumerate(lines):
        if _HARMLESS.search(line):
            continue
        frame = bool(marked) and marked[-1] == n - 1 and _FRAME.match(line)
        if frame or _ERROR.search(line) or _POINTS_UP.search(line):
            marked.append(n)
    if not marked or len(lines) - marked[-1] > _NEAR_THE_END_LINES:
        return []
    gaps = [(before, after) for before, after in pairwise(marked) if after - before > _GAP_LINES]
    firsts, lasts = [marked[0], *(after for _, after in gaps)], [*(before for before, _ in gaps), marked[-1]]
    found: list[list[str]] = []
    for first, last in zip(reversed(firsts), reversed(lasts), strict=True):
        # An exception's text may have more lines, which do not look like errors.
        burst = [line for line in lines[first : last + _GAP_LINES] if not _HARMLESS.search(line)]
        found.insert(0, burst)
        if not _only_points_up(burst):
            break
    return found


def _only_points_up(burst: list[str]) -> bool:
    """Whether it only tells that the cause is further up."""
    exceptions = [line for line in burst if _ends_traceback(line)] or [line for line in burst if _ERROR.search(line)]
    return any(_POINTS_UP.search(line) for line in burst) and all(_POINTS_UP.search(line) for line in exceptions)


def _ends_traceback(line: str) -> bool:
    """Whether a line is the exception itself; vLLM puts process name, time and place before every line."""
    return (
        re.search(r"(^|\] |^\([^)]*\) |\d\d:\d\d:\d\d )[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b", line)
        is not None
    )


def started_again(text: str) -> bool:
    """Whether these are the last words of a launcher that was refused, because its group had begun without it."""
    return _AGAIN.search(text) is not None


def tells_of_another(text: str) -> bool:
    """Whether the errors that a log ends with only tell that another pod's process has ended."""
    lines = _last_errors(text)
    named = [line for line in lines if _ends_traceback(line)] or [line for line in lines if _ERROR.search(line)]
    if not named or not all(_of_others(line) for line in named):
        return False
    # A process of the pod itself, killed, leaves no error of its own: only that of the one that watched it.
    return any(_OF_A_PEER.search(line) for line in named) or not any(_DIED.search(line) for line in lines)


def _of_others(line: str) -> bool:
    return any(pattern.search(line) for pattern in (_OF_A_PEER, _OF_AN_ENGINE, _POINTS_UP))


def tells_of_itself(text: str) -> bool:
    """Whether a log ends with errors, and they are not only about another pod's end."""
    return any(_ERROR.search(line) for line in _last_errors(text)) and not tells_of_another(text)


def _last_errors(text: str) -> list[str]:
    return [line for burst in _last_bursts(text.splitlines()) for line in burst]


def tail(text: str) -> str:
    """The last whole lines, at most TAIL_MAX characters."""
    if len(text) <= TAIL_MAX:
        return text
    cut = text[-TAIL_MAX:]
    return cut.partition("\n")[2] or cut
