"""What a log says about why an engine ended. Pure.

The last lines of an engine's log often only say that a worker died and that the root cause is further up, so two parts
are kept: the first lines that name an error, and the tail. A reason is derived only where the text is unmistakable.
"""

from __future__ import annotations

import re

FIRST_ERROR_MAX = 1024
TAIL_MAX = 2048
_ERROR_BLOCK_LINES = 12

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
            r"Watchdog caught collective operation timeout|collective operation timed? ?out|"
            r"(NCCL|RCCL|HCCL|[Gg]loo|ProcessGroup\w*).{0,200}([Tt]imed? ?out)|[Tt]imed out.{0,80}(all_?reduce|barrier|broadcast)"
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
    r"Traceback \(most recent call last\)|\b(ERROR|CRITICAL|FATAL)\b|\w*(Error|Exception)\b: |\berror: "
)


def reason(text: str) -> str:
    """The cause in one word where the log is clear about it, "" otherwise."""
    return next((name for name, pattern in _COMPILED if pattern.search(text)), "")


def version_too_old(text: str) -> str:
    """The vLLM version in the image, where a launcher says that it is too old for what is asked; "" otherwise."""
    found = _TOO_OLD.search(text)
    return found.group(1) if found else ""


def first_error(text: str) -> str:
    """The first lines that name an error, at most FIRST_ERROR_MAX characters; "" where none does."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if _ERROR.search(line)), None)
    if start is None:
        return ""
    if "Traceback" in lines[start]:
        # The frames say less than the exception below them.
        end = next((n for n in range(start + 1, len(lines)) if _ends_traceback(lines[n])), start)
        block = [lines[start], *lines[max(start + 1, end - 4) : end + 3]]
    else:
        block = lines[start : start + _ERROR_BLOCK_LINES]
    return "\n".join(block)[:FIRST_ERROR_MAX]


def _ends_traceback(line: str) -> bool:
    """Whether a line is the exception itself; vLLM puts process name and time before every line."""
    return re.search(r"(^|\] )[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b", line) is not None


def tail(text: str) -> str:
    """The last whole lines, at most TAIL_MAX characters."""
    if len(text) <= TAIL_MAX:
        return text
    cut = text[-TAIL_MAX:]
    return cut.partition("\n")[2] or cut
