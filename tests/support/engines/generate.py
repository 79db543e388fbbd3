"""Run one engine in a process of its own: JSON in on standard input, JSON out in a file.

For what cannot share the test's process: tensor parallelism, another scheduler, stock's own class
(``VLLM_PLUGINS=vllm_diffusion_cpu``).
"""

import atexit
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Of an engine for tests, in any process.
SMALL: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0},
    "kv_cache_memory_bytes": 64 * 1024**2,
}


def small_engine(model: Path | str, **options: Any) -> dict[str, Any]:
    """Return arguments of ``LLM`` for a small engine."""
    return {"model": str(model)} | SMALL | options


def run_aside(
    module: str, job: Any, *, timeout: float = 900, **environment: str
) -> tuple[Any, str]:
    """Run a module that calls :func:`work_aside` in a process of its own.

    Returns:
        The result of its work, and what it printed.
    """
    # Not for the process itself, which may have to be without this package.
    from tests.support.engines.commands import run

    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = (sys.executable, "-m", module, result)
        options = {"timeout": timeout, "env": inherited | environment}
        process = run(*command, input=json.dumps(job), **options)
        return json.loads(result.read_text()), process.stdout + process.stderr


def work_aside(work: Callable[[Any], Any]) -> None:
    """Do in this process what :func:`run_aside` asks of it."""
    # A collection walks the million objects that imports make. vLLM asks for several when it starts
    # and when it ends, and Python for more: together half of this process's time.
    gc.disable()
    gc.unfreeze = gc.collect = lambda *_: 0
    atexit.register(gc.freeze)
    Path(sys.argv[1]).write_text(json.dumps(work(json.load(sys.stdin))))


def run_engine(job: dict[str, Any], **environment: str) -> dict[str, Any]:
    """Start a process, run ``job``, return what it wrote.

    Args:
        job: ``engine`` (keyword arguments of ``LLM``) and ``batches`` of requests, which run one
            after another; a request has ``prompt`` (token ids) and ``params``, and may have
            ``adapter``, its name, number and folder. ``then_read`` is a last request whose prompt
            is the first one's with what was generated for it.
        environment: Variables for the process.
    """
    # Ranks begin with what this one has imported, half of their start's work.
    answer, log = run_aside(__name__, job, VLLM_WORKER_MULTIPROC_METHOD="fork", **environment)
    return {**answer, "log": log}


def tokens_of_batch(
    checkpoint: Path, requests: list[dict[str, Any]], **options: Any
) -> list[list[int]]:
    """Return the answers of an engine in a process of its own to one batch of requests."""
    job = {"engine": small_engine(checkpoint, **options), "batches": [requests]}
    (answers,) = run_engine(job)["batches"]
    return [answer["tokens"] for answer in answers]


def sampling_arguments(params: dict[str, Any]) -> dict[str, Any]:
    """Return ``params`` as before JSON, with token ids of a bias and constraints restored."""
    from vllm.sampling_params import StructuredOutputsParams

    own: dict[str, Any] = {}
    if bias := params.get("logit_bias"):
        own["logit_bias"] = {int(k): v for k, v in bias.items()}
    if constraint := params.get("structured_outputs"):
        own["structured_outputs"] = StructuredOutputsParams(**constraint)
    return params | own


def run_batches(llm: Any, job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the answer to each request of ``job``, batch by batch, of an engine of any process."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    batches: list[list[dict[str, Any]]] = []
    while len(batches) < len(job["batches"]) + ("then_read" in job):
        if len(batches) < len(job["batches"]):
            batch = job["batches"][len(batches)]
        else:
            context = job["batches"][0][0]["prompt"] + batches[0][0]["tokens"]
            batch = [job["then_read"] | {"prompt": context}]
        outputs = llm.generate(
            [{"prompt_token_ids": request["prompt"]} for request in batch],
            [SamplingParams(**sampling_arguments(request["params"])) for request in batch],
            lora_request=[
                LoRARequest(*request["adapter"]) if "adapter" in request else None
                for request in batch
            ],
            use_tqdm=False,
        )
        answers = []
        for output in outputs:
            completion = output.outputs[0]
            answer: dict[str, Any] = {
                "tokens": list(completion.token_ids),
                "num_cached_tokens": output.num_cached_tokens,
            }
            if completion.logprobs is not None:
                # [positions][vocabulary id] -> log-probability.
                answer["logprobs"] = [
                    [
                        position[token].logprob if token in position else None
                        for token in range(max(position) + 1)
                    ]
                    for position in completion.logprobs
                ]
            answers.append(answer)
        batches.append(answers)
    return batches


def _generate(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    return {"batches": run_batches(LLM(**job["engine"]), job)}


if __name__ == "__main__":
    work_aside(_generate)
