"""Answers that ``vllm-diffusion doctor --gpu`` compares, on the null GPU with true values, with one
planted fault after another.
"""

from functools import update_wrapper
from typing import Any

from tests.support.null_gpu import true_values
from tests.support.null_gpu.counts import counts_of, summary

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
