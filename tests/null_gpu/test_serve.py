"""Tests of ``vllm serve`` on the CUDA platform, with the processes that vLLM spawns."""

import os

import pytest

from tests.support.engines.server import start_server
from tests.support.models.checkpoints import SHIPPED
from tests.support.null_gpu.processes import ROOT, environment

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.timeout(400)
def test_a_server_answers(tmp_path):
    """A server with a spawned engine process answers over HTTP in eager mode."""
    # From 9.0 vLLM compiles a kernel of CUTLASS's for the router when few rows are routed, with a
    # runtime of its own that asks the driver for undocumented tables.
    variables = environment(tmp_path, NULL_GPU_CAPABILITY="8.9")
    variables["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    # What a pass emits would else be what memory happens to hold that no kernel has written.
    decided = ("--worker-extension-cls", "tests.null_gpu.decided_outcomes.DecidedOutcomes")
    with start_server(SHIPPED, tmp_path / "log", *decided, **variables) as server:
        body = {"prompt": "a " * 200, "max_tokens": 8, "vllm_xargs": {"diffusion_max_steps": 1}}
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")
        server.assert_alive()
        log = server.log.read_text()
        assert "EngineCore" in log, "the engine has a process of its own"
        (line,) = (each for each in log.splitlines() if "vllm-diffusion doctor --gpu" in each)
        assert "This GPU has not been checked" in line
