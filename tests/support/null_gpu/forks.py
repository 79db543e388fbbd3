"""Runs cases, each in a fork of a process that has imported torch or vLLM.

``processes.NullGpu`` starts it. It reads a case as a line of JSON, and answers with its outcome as
one.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from typing import Any

RUNTIME = "libcudart.so.13"
# What an engine imports sooner or later.
WITH_VLLM = (
    "transformers",
    "torch._dynamo",
    "torch._inductor.config",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_worker",
)


def import_first(what: str) -> None:
    """Import what cases need, without using the GPU: a process that has used it cannot fork."""
    import torch

    if what == "vllm":
        for name in WITH_VLLM:
            importlib.import_module(name)
        from vllm.platforms import current_platform

        assert current_platform.is_cuda(), type(current_platform)
        # vLLM looks at a model's class in a process of its own, which imports everything again, to
        # keep CUDA out of the one that may still fork. A case is such a process already.
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda look: look()
    assert not torch.cuda.is_initialized()
    gc.collect()
    gc.freeze()
    # vLLM thaws it when it has captured its graphs, and would walk through it a dozen times after
    # that.
    gc.unfreeze = lambda: None


def run_case(request: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of a case, in the process that was forked for it."""
    os.environ.update(request["variables"])
    runtime = ctypes.CDLL(RUNTIME)
    runtime.null_gpu_choose.argtypes = (ctypes.c_char_p, ctypes.c_double)
    runtime.null_gpu_choose(request["capability"].encode(), request["gib"])
    module, _, name = request["case"].partition(":")
    try:
        value = getattr(importlib.import_module(module), name)(**request["arguments"])
    except BaseException as error:
        traceback.print_exc()
        return {"value": None, "error": f"{type(error).__name__}: {error}"}
    return {"value": value, "error": None}


def fork(request: dict[str, Any]) -> dict[str, Any]:
    """Run a case in a child of its own process group, for at most the case's seconds."""
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        log = os.open(request["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable()
        # Where it stands, when it is ended for its time.
        faulthandler.dump_traceback_later(request["seconds"], exit=True)
        outcome = json.dumps(run_case(request)).encode()
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(writable, "wb") as pipe:
            pipe.write(outcome)
        # Without what libraries do at an end, which was not what the case is about.
        os._exit(0)
    os.close(writable)
    outcome = _read(readable, request["seconds"] + 30)
    # What the case has started ends with it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not outcome:
        return {"value": None, "error": f"its process ended with status {status}, or took too long"}
    return json.loads(outcome)


def _read(pipe: int, seconds: float) -> bytes:
    """Return what comes from a pipe until it is closed, or nothing for that long."""
    parts = []
    with os.fdopen(pipe, "rb", buffering=0) as file:
        while select.select([file], [], [], seconds)[0]:
            part = file.read(1 << 16)
            if not part:
                break
            parts.append(part)
    return b"".join(parts)


def main() -> None:
    # What libraries print goes to the log, and answers alone to the one who asked.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_first(sys.argv[1])
    for line in sys.stdin:
        answers.write(json.dumps(fork(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
