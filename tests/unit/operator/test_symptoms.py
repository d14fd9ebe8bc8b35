"""What is read from an engine's log, with lines as vLLM and PyTorch write them."""

from __future__ import annotations

import pytest

from dp_operator import symptoms
from dp_operator.api import Failure
from dp_operator.failure import explained

ROOT_CAUSE = """\
INFO 11-30 16:00:01 [api_server.py:1] starting
(EngineCore_DP3 pid=71) ERROR 11-30 16:00:09 [core.py:700] EngineCore failed to start.
(EngineCore_DP3 pid=71) ERROR 11-30 16:00:09 [core.py:700] Traceback (most recent call last):
(EngineCore_DP3 pid=71) ERROR 11-30 16:00:09 [core.py:700] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
"""
LAST_WORDS = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("vllm serve: error: unrecognized arguments: --data-paralel-size 2", "ArgumentsRejected"),
        ("huggingface_hub.errors.GatedRepoError: 403 Client Error.", "ModelAccessDenied"),
        ("OSError: [Errno 28] No space left on device: '/root/.cache'", "DiskFull"),
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            "NoKVCacheMemory",
        ),
        (
            (
                "ValueError: To serve at least one request with the models's max seq len (131072), (16 GiB KV cache is "
                "needed, which is larger than the available KV cache memory (8 GiB)"
            ),
            "NoKVCacheMemory",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB", "GPUOutOfMemory"),
        ("Free memory on device (3/80 GiB) on startup is less than desired GPU memory utilization", "GPUOutOfMemory"),
        ("[rank3]:[E1130 ProcessGroupNCCL.cpp:632] Watchdog caught collective operation timeout", "CollectiveTimeout"),
        ("RuntimeError: [gloo/transport/tcp/pair.cc] Gloo: Timed out waiting 1800000ms for recv", "CollectiveTimeout"),
        ("RuntimeError: something else", ""),
    ],
)
def test_a_clear_log_names_the_cause(text, reason):
    assert symptoms.reason(text) == reason


def test_the_first_error_is_kept_beside_a_tail_that_only_points_at_it():
    """The first failure's log is lost otherwise: gpustack#5657, #6019, vllm#28498."""
    text = ROOT_CAUSE + "INFO noise\n" * 900 + LAST_WORDS
    failure = Failure(reason="EngineExited", time="2026-01-01T00:00:00Z", exit_code=1)
    found = explained(failure, text)
    assert found.reason == "GPUOutOfMemory"
    assert found.first_error_lines.startswith("(EngineCore_DP3 pid=71) ERROR")
    assert "CUDA out of memory" in found.first_error_lines
    assert found.log_tail.endswith(LAST_WORDS)
    assert len(found.log_tail) <= symptoms.TAIL_MAX
    assert len(found.first_error_lines) <= symptoms.FIRST_ERROR_MAX


def test_a_traceback_is_kept_with_the_exception_and_not_only_its_frames():
    frames = "".join(f'  File "f{n}.py", line {n}, in f\n    call()\n' for n in range(40))
    text = f"Traceback (most recent call last):\n{frames}ValueError: the real reason\nbye\n"
    assert "ValueError: the real reason" in symptoms.first_error(text)


def test_a_kill_by_the_kernel_is_not_explained_away_by_the_log():
    failure = Failure(reason="OutOfMemory", time="2026-01-01T00:00:00Z", exit_code=137, signal="SIGKILL")
    assert explained(failure, ROOT_CAUSE).reason == "OutOfMemory"


def test_an_empty_log_changes_nothing():
    failure = Failure(reason="EngineExited", time="2026-01-01T00:00:00Z", log_tail="from the termination message")
    assert explained(failure, " \n") == failure
