"""The engine's grammars are compiled in threads that it can leave."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_diffusion.scheduling import grammars


class Manager(StructuredOutputManager):
    """vLLM's manager of grammars, with no more than ends with it."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)
        self.executor_for_fillmask = ThreadPoolExecutor(1)
        self.fill_bitmask_parallel_threshold = 0
        limits = SimpleNamespace(max_num_seqs=1)
        model = SimpleNamespace(skip_tokenizer_init=False)
        self.vllm_config: Any = SimpleNamespace(scheduler_config=limits, model_config=model)
        self.backend = None


def test_endless_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that is never compiled becomes an error of its request, and the engine ends."""
    monkeypatch.setattr(grammars, "MOST_SECONDS", 0.1)
    manager, for_ever = Manager(), threading.Event()
    grammars.EngineGrammars.of(manager)
    waiting = StructuredOutputRequest(StructuredOutputsParams(regex="a"))
    waiting.grammar = manager.executor.submit(for_ever.wait)
    while waiting.grammar is None:
        pass
    assert "takes more than 0.1 s" in str(waiting.grammar)
    manager.executor.submit(for_ever.wait)
    manager.clear_backend()
    for_ever.set()
