"""A server of ours that is told to end waits for its engine, which ends the open requests."""

from __future__ import annotations

import pytest

from vllm_diffusion.cli.checkpoint import shipped_checkpoint

pytestmark = pytest.mark.engine

VARIABLE = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"


@pytest.mark.parametrize(("family", "awaited"), [("sdar", 5), ("qwen3", 0)])
def test_engine_is_awaited(family: str, awaited: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own means, where its server would kill the engine at once; ordinary models are vLLM's."""
    from vllm import EngineArgs
    from vllm.v1.engine.utils import get_engine_process_shutdown_timeout

    monkeypatch.setenv(VARIABLE, "9")
    config = EngineArgs(str(shipped_checkpoint(family)), max_model_len=256).create_engine_config()
    limit = config.shutdown_timeout
    assert limit == 0
    assert get_engine_process_shutdown_timeout(limit, limit) == 9
    monkeypatch.delenv(VARIABLE)
    EngineArgs(str(shipped_checkpoint(family)), max_model_len=256).create_engine_config()
    assert get_engine_process_shutdown_timeout(limit, limit) == awaited
