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
        (
            "ValueError: Free memory on device (3/80 GiB) on startup is less than desired GPU memory utilization",
            "GPUOutOfMemory",
        ),
        ("[rank3]:[E1130 ProcessGroupNCCL.cpp:632] Watchdog caught collective operation timeout", "CollectiveTimeout"),
        ("RuntimeError: [gloo/transport/tcp/pair.cc] Gloo: Timed out waiting 1800000ms for recv", "CollectiveTimeout"),
        (
            "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, world size: 4",
            "CollectiveTimeout",
        ),
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


CRASH = """\
(EngineCore_DP0 pid=70) Traceback (most recent call last):
(EngineCore_DP0 pid=70)   File "core.py", line 7, in run
(EngineCore_DP0 pid=70)     step()
(EngineCore_DP0 pid=70) AssertionError: tokens do not add up
"""


@pytest.mark.parametrize(
    "earlier",
    [
        pytest.param(
            "INFO 11-30 16:00:02 [a.py:1] ProcessGroupNCCL created, timeout=600s\n", id="a setting, just before"
        ),
        pytest.param("ProcessGroupNCCL created, timeout=600s\n", id="a setting without a level"),
        pytest.param("WARNING 11-30 16:00:02 [a.py:1] No space left on device for the cache\n", id="a warning"),
        pytest.param("OSError: [Errno 28] No space left on device\n" + "INFO noise\n" * 1000, id="survived long ago"),
        pytest.param("OSError: [Errno 28] No space left on device\n" + "INFO noise\n" * 30, id="survived"),
        pytest.param(ROOT_CAUSE + "INFO noise\n" * 30, id="a traceback that was survived"),
    ],
)
def test_a_crash_is_not_explained_by_what_the_engine_has_survived(earlier):
    assert symptoms.reason(earlier + CRASH) == ""
    assert symptoms.first_error(earlier + CRASH).startswith(CRASH.splitlines()[0])


@pytest.mark.parametrize("between", ["", "INFO noise\n" * 100])
@pytest.mark.parametrize("last", [LAST_WORDS, "asyncio.exceptions.CancelledError\n"])
def test_the_errors_of_requests_do_not_hide_the_traceback_that_ended_the_engine(between, last):
    """Between the cause and the line that points at it lies what other processes say on their way out."""
    text = "ERROR 11-30 15:00:00 [serving.py:9] client sent bad request\n" + "INFO noise\n" * 20 + ROOT_CAUSE
    found = symptoms.first_error(text + between + "Traceback (most recent call last):\n" + last)
    assert found.startswith("(EngineCore_DP3 pid=71) ERROR 11-30 16:00:09 [core.py:700] EngineCore failed")
    assert "CUDA out of memory" in found


def test_an_engine_that_goes_without_a_word_has_no_error_from_long_before():
    text = ROOT_CAUSE + "INFO noise\n" * 300
    assert (symptoms.reason(text), symptoms.first_error(text)) == ("", "")


def test_what_the_launcher_says_before_the_engine_starts_is_no_error():
    text = (
        "launch: the monitor does not answer yet (ConnectionRefusedError: [Errno 111] Connection refused)\n"
        "launch: engine 0.33.0, 1 ranks from 1: python3 -c 'raise OSError(\"No space left on device\")'\n"
    )
    assert symptoms.first_error(text) == ""
    assert symptoms.first_error(text + CRASH).startswith(CRASH.splitlines()[0])
    assert symptoms.reason(text + CRASH) == ""


def test_of_several_processes_that_end_at_once_the_first_error_is_kept():
    text = ROOT_CAUSE + CRASH
    assert symptoms.first_error(text).startswith("(EngineCore_DP3 pid=71) ERROR")
    assert symptoms.reason(text) == "GPUOutOfMemory"


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


@pytest.mark.parametrize(
    "text",
    [
        "ERROR RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer [198.18.1.2]:4000",
        (
            "ERROR torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or "
            "there was a network error, NCCL version 2.21.5"
        ),
        "ERROR vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
        "ERROR RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer [198.18.1.2]:4000\n"
        + LAST_WORDS,
    ],
)
def test_a_log_of_an_engine_that_fell_because_of_another_is_known(text):
    assert symptoms.tells_of_another(text)
    assert not symptoms.tells_of_itself(text)
    assert symptoms.tells_of_itself(ROOT_CAUSE + text), "its own trouble comes first"


@pytest.mark.parametrize(
    "text",
    [
        # A child of the same pod, killed.
        (
            "(EngineCore_DP0 pid=7) ERROR 11-30 16:00:09 [multiproc_executor.py:190] Worker proc VllmWorker-1 died unexpectedly\n"
            "(APIServer pid=1) ERROR 11-30 16:00:10 [async_llm.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore"
        ),
        "(EngineCore_DP0 pid=7) ERROR 11-30 16:00:09 Engine core proc(s) died unexpectedly: {'EngineCore_DP1': -9}; stopping",
        # A download, a client.
        "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_a_log_of_trouble_within_the_pod_is_not_taken_for_that_of_a_victim(text):
    assert symptoms.tells_of_itself(text)


def test_a_log_without_errors_tells_of_nothing():
    assert not symptoms.tells_of_itself("INFO bye")
    assert not symptoms.tells_of_another("INFO bye")
