"""Who owns a flag, judged by an argument parser that takes flags as vLLM's does.

The parser below is Python's own with the one change that matters here: underscores in `--` flags become dashes. It has
the flags of vLLM that begin like an owned one, so that abbreviations are ambiguous where they are in vLLM.
"""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_operator.rules import OWNED_FLAGS, owns

OWNED = {
    "--data-parallel-size": ["-dp"],
    "--data-parallel-size-local": ["-dpl"],
    "--data-parallel-start-rank": ["-dpr"],
    "--data-parallel-rank": ["-dpn"],
    "--data-parallel-address": ["-dpa"],
    "--data-parallel-rpc-port": ["-dpp"],
    "--data-parallel-backend": ["-dpb"],
    "--data-parallel-hybrid-lb": ["-dph"],
    "--data-parallel-external-lb": ["-dpe"],
    "--data-parallel-multi-port-external-lb": ["-dpm"],
    "--data-parallel-supervisor-port": [],
    "--tensor-parallel-size": ["-tp"],
    "--pipeline-parallel-size": ["-pp"],
    "--prefill-context-parallel-size": ["-pcp"],
    "--enable-expert-parallel": ["-ep"],
    "--no-enable-expert-parallel": [],
    "--api-server-count": ["-asc"],
    "--port": [],
    "--shutdown-timeout": [],
    "--config": [],
    "--headless": [],
    "--host": [],
    "--uds": [],
    "--nnodes": ["-n"],
    "--node-rank": ["-r"],
    "--master-addr": [],
    "--master-port": [],
}
FREE = {
    "--model": [],
    "--max-model-len": [],
    "--max-num-seqs": [],
    "--api-key": [],
    "--additional-config": [],
    "--attention-backend": [],
    "--attention-config": ["-ac"],
    "--all2all-backend": [],
    "--compilation-config": ["-cc"],
    "--config-format": [],
    "--convert": [],
    "--chat-template": [],
    "--dtype": [],
    "--device-ids": [],
    "--decode-context-parallel-size": ["-dcp"],
    "--dp-sync-interval": [],
    "--enable-eplb": [],
    "--enable-elastic-ep": [],
    "--enable-lora": [],
    "--enable-prefix-caching": [],
    "--no-enable-prefix-caching": [],
    "--hf-overrides": [],
    "--hf-token": [],
    "--kv-transfer-config": [],
    "--numa-bind": [],
    "--override-generation-config": [],
    "--pooler-config": [],
    "--prefix-caching-hash-algo": [],
    "--quantization": ["-q"],
    "--revision": [],
    "--root-path": [],
    "--seed": [],
    "--served-model-name": [],
    "--show-hidden-metrics-for-version": [],
    "--task": [],
    "--tokenizer": [],
    "--trust-remote-code": [],
    "--uvicorn-log-level": [],
}


class RefusalError(Exception):
    pass


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise RefusalError(message)


def parser_of(flags):
    parser = Parser(prog="vllm", add_help=True)
    for flag, short in flags.items():
        kind = int if flag in {"--nnodes", "--node-rank"} else str
        parser.add_argument(flag, *short, dest=flag, nargs="?", action="append", type=kind)
    parser.add_argument("values", nargs="*")
    return parser


ALL = parser_of(OWNED | FREE)
# An older release has fewer flags beside the owned ones, so that more abbreviations are unambiguous there.
NEWER = {"--attention-config", "--compilation-config", "--enable-eplb", "--enable-elastic-ep", "--numa-bind"}
NEWER |= {
    "--decode-context-parallel-size",
    "--prefill-context-parallel-size",
    "--all2all-backend",
    "--dp-sync-interval",
}
OLDER = parser_of({flag: short for flag, short in (OWNED | FREE).items() if flag not in NEWER})


def owned_flag(arg):
    return next((owned for owned in OWNED_FLAGS if owns(owned, arg)), None)


def as_vllm_reads(arg):
    key, equals, value = arg.partition("=")
    return (key.replace("_", "-") if key.startswith("--") else key) + equals + value


def flag_seen(parser, arg):
    """The flag that a parser takes one argument for, or None."""
    try:
        seen = vars(parser.parse_args([as_vllm_reads(arg)]))
    except (RefusalError, SystemExit):
        return None
    return next((flag for flag, values in seen.items() if flag.startswith("-") and values), None)


def spellings(flags):
    forms = [form for flag, short in flags.items() for form in (flag, *short)]
    cut = st.sampled_from(forms).flatmap(lambda form: st.integers(1, len(form)).map(lambda n: form[:n]))
    spelt = st.builds(
        lambda form, under: form[:2] + (form[2:].replace("-", "_") if under else form[2:]), cut, st.booleans()
    )
    tail = st.sampled_from(["", "", "=8", "8", "=", "-x", "=a_b=c"])
    return st.builds(lambda form, end: form + end, spelt, tail)


@given(spellings(OWNED | FREE))
def test_whatever_the_parser_takes_for_an_owned_flag_is_refused(arg):
    for parser in (ALL, OLDER):
        if flag_seen(parser, arg) in OWNED:
            assert owned_flag(arg) is not None


@given(spellings(OWNED | FREE))
def test_whatever_the_parser_takes_for_a_free_flag_passes(arg):
    if flag_seen(ALL, arg) in FREE:
        assert owned_flag(arg) is None


@given(st.text(max_size=20).filter(lambda text: not text.startswith("-")))
def test_a_value_passes(value):
    assert owned_flag(value) is None


@pytest.mark.parametrize("flag", [*FREE, *(short for shorts in FREE.values() for short in shorts)])
def test_a_free_flag_passes_in_every_form(flag):
    for arg in (flag, flag + "=1", flag.replace("-", "_").replace("__", "--", 1)):
        assert owned_flag(arg) is None


@pytest.mark.parametrize("flag", [*OWNED, *(short for shorts in OWNED.values() for short in shorts)])
def test_an_owned_flag_is_refused_in_every_form(flag):
    for arg in (flag, flag + "=1", "--" + flag[2:].replace("-", "_") if flag.startswith("--") else flag):
        assert owned_flag(arg) is not None


@pytest.mark.parametrize(
    "value", ["-1", "-0.5", "-", "--", "n", "r", "-1e5", "=--port", '{"a": "--port"}', "-x", "-O3", "-cc"]
)
def test_what_looks_nearly_like_a_flag_passes(value):
    assert owned_flag(value) is None


def test_one_flag_has_one_owner():
    owners = [owned for flag in OWNED for owned in OWNED_FLAGS if owns(owned, flag)]
    assert len(owners) == len(OWNED)
    assert set(owners) == set(OWNED_FLAGS)
