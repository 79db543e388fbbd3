"""The CUDA platform gives the tokens of the CPU platform where the null GPU computes.

Asynchronous copies, tensors of the host that the device reads, addresses in graphs and the order of
their replays are then those of a GPU; kernels are Triton's in its interpreter, or torch's for a
CPU.
"""

from collections.abc import Iterator
from functools import update_wrapper
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.engines.generate import run_engine
from tests.support.models.checkpoints import SHIPPED
from tests.support.models.prompts import chat_prompt
from tests.support.null_gpu import true_values
from tests.support.null_gpu.counts import counts_of, summary
from tests.support.null_gpu.processes import NullGpu

pytestmark = pytest.mark.engine

REQUESTS: dict[str, dict[str, Any]] = {
    "Reverse the word: stone": {"temperature": 0.0},
    "Count from 3 to 12.": {"temperature": 1.0, "seed": 7, "top_p": 0.8},
    "Write in upper case: hello": {"temperature": 1.0, "seed": 9, "logprobs": 2},
}
ENGINE: dict[str, Any] = {
    "model": str(SHIPPED),
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 128,
    "kv_cache_memory_bytes": 2**25,
    "limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0},
}
# Of the recorded questions those with short answers: a sum, a word backwards and a line of JSON.
QUESTIONS = [1, 12, 33]
# Graphs without Inductor, whose kernels nothing interprets. vLLM's compiled operators have
# PyTorch's in their place.
ON_THE_GPU: dict[str, Any] = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "custom_ops": ["none"],
    },
    "kernel_config": {
        "enable_flashinfer_autotune": False,
        "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
    },
}


@pytest.fixture(scope="module")
def computing_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NullGpu]:
    """A null GPU whose Triton kernels are interpreted. On 9.0 vLLM's own kernels are CuTe's."""
    with NullGpu(
        tmp_path_factory.mktemp("true_values"), imports="vllm", capability="8.0", interprets=True
    ) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["fused", "asynchronous"])
def test_tokens(computing_gpu, asynchronous):
    """Alone and in a batch, with graphs: the tokens of the CPU platform, and no kernel that
    computed nothing.
    """
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    requests = [
        {
            "prompt": chat_prompt(tokenizer, question),
            "params": params | {"max_tokens": 24, "detokenize": False},
        }
        for question, params in REQUESTS.items()
    ]
    job = {
        "engine": ENGINE | {"async_scheduling": asynchronous},
        "batches": [*([request] for request in requests), requests],
    }
    on_the_cpu = run_engine(job | {"engine": job["engine"] | {"enforce_eager": True}})
    on_the_gpu = computing_gpu.run(
        "tests.null_gpu.engine_cases:answer",
        capability="8.0",
        seconds=1700,
        job=job | {"engine": job["engine"] | ON_THE_GPU},
    ).checked()
    assert on_the_gpu["launched"] == []
    assert on_the_gpu["graphs"] > 0
    answers = tokens_of(on_the_cpu)
    assert tokens_of(on_the_gpu) == answers
    # Those of no answer could be equal by chance.
    assert all(len(set(answer)) > 4 for batch in answers for answer in batch), answers


FAULTS = ("kernel", "compiled", "graph")


def compare_answers(engine: dict[str, Any], questions: list[int]) -> dict[str, dict[str, Any]]:
    """Ask some of the recorded questions, and compare the answers with the recorded ones as the
    command does.

    One engine is asked without a fault and with each, since a start takes longer than the answers.

    Args:
        engine: Arguments of ``LLM``.
        questions: Which of the recorded questions. Their answers fit into one canvas.

    Returns:
        By fault, and by ``none``: ``problem``, what the command would say; ``different``, a line
        for each answer that differs; ``graphs``, how many were replayed.
    """
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import gemma4

    from vllm_diffusion.cli.gpu_answers import ASKED, Answered, compare, recorded

    true_values.compute()
    # Its kernel has a program for each row, whose sort an interpreter runs for longer than all else
    # of a pass.
    gemma4.gemma4_fused_routing_kernel_triton = gemma4.gemma4_routing_function_torch
    faults = Faults()
    llm = LLM(**engine)
    everything = recorded()
    some = [everything[i] for i in questions]
    # A wrong answer may never end.
    params = SamplingParams(**ASKED | {"max_tokens": 32})

    def ask(batch: Any) -> list[str]:
        # What a fault has left there would be the next one's.
        llm.reset_prefix_cache()
        outputs = llm.chat([each.messages for each in batch], params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    found: dict[str, dict[str, Any]] = {}
    compared: list[Answered] = []
    for fault in ("none", *FAULTS):
        faults.switch(fault)
        counts = counts_of(lambda: compared.append(compare(some, ask)))
        found[fault] = {**compared[-1]._asdict(), "graphs": summary(counts)["graphs"]}
    return found


class Faults:
    """Faults that are in what an engine captures, and are switched on by numbers on the device."""

    def __init__(self) -> None:
        """Plant them; the engine starts afterwards."""
        import torch

        from attention_kernels.canvas_attention.triton.launch import CanvasLaunch
        from vllm_diffusion.canvas.pass_rows import PassRows
        from vllm_diffusion.startup.cuda_graphs import GraphedFunction

        self.in_kernel = in_kernel = torch.zeros((), device="cuda")
        self.in_compiled = in_compiled = torch.zeros((), dtype=torch.int64, device="cuda")
        self.in_graph = in_graph = torch.zeros((), dtype=torch.bool, device="cuda")
        launch, select, capture = (
            CanvasLaunch.__call__,
            PassRows._by_request,
            GraphedFunction.capture,
        )

        def launch_wrongly(self: Any, query: Any, cache: Any, out: Any) -> None:
            """Write one wrong value for each row."""
            launch(self, query, cache, out)
            out[:, 0, 0] += 8.0 * in_kernel

        def select_wrongly(self: Any, tokens: Any, *counts: Any) -> Any:
            """Give each position of an answer the next one's token, as a search that was compiled
            wrongly did.
            """
            place = torch.arange(tokens.shape[1], device=tokens.device) + in_compiled
            return select(self, tokens[:, place % tokens.shape[1]], *counts)

        def capture_wrongly(self: Any, make: Any, *inputs: Any, **others: Any) -> None:
            """Capture a graph that reads its inputs where they were when it was captured."""
            old = [each.clone() for each in inputs]
            function = self._function

            def call(*given: Any, **named: Any) -> Any:
                read = (torch.where(in_graph, *pair) for pair in zip(old, given, strict=True))
                return function(*read, **named)

            self._function = update_wrapper(call, function)
            capture(self, make, *inputs, **others)
            self._function = function

        CanvasLaunch.__call__ = launch_wrongly
        PassRows._by_request = select_wrongly
        GraphedFunction.capture = capture_wrongly

    def switch(self, fault: str) -> None:
        """Switch one fault on, and the others off; ``none`` leaves all off."""
        self.in_kernel.fill_(fault == "kernel")
        self.in_compiled.fill_(fault == "compiled")
        self.in_graph.fill_(fault == "graph")


@pytest.fixture(scope="module")
def compared_answers(computing_gpu) -> dict[str, dict[str, Any]]:
    """What ``doctor --gpu`` finds in some answers, without a fault and with each planted one."""
    case = f"{__name__}:compare_answers"
    outcome = computing_gpu.run(
        case, capability="8.0", seconds=1700, engine=ENGINE | ON_THE_GPU, questions=QUESTIONS
    )
    return outcome.checked()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_planted_faults(compared_answers, fault):
    """The answers that ``doctor --gpu`` compares are those of a CPU, and all differ with a planted
    fault.
    """
    found = compared_answers[fault]
    assert found["graphs"] > 0
    assert len(found["different"]) == (0 if fault == "none" else len(QUESTIONS)), found
    assert bool(found["problem"]) == (fault != "none")


def tokens_of(answers: dict[str, Any]) -> list[list[list[int]]]:
    return [[answer["tokens"] for answer in batch] for batch in answers["batches"]]
