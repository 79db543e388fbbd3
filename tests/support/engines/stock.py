"""How far vLLM gets with a file in a process with nothing of ours except the CPU platform."""

from contextlib import suppress
from typing import Any

from tests.support.engines.generate import run_aside, small_engine, work_aside


def run_in_stock(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Start an engine for each job, one after another, and ask it for a few tokens, with a draft
    greedy ones.

    Args:
        jobs: Keyword arguments of ``LLM`` each; ``adapter`` is the folder of one that the request
            names.

    Returns:
        For each the ``stage`` at which vLLM raises, as it reads options and files (start), as it
        loads the model (load) or at the request, and its ``error``; or ``tokens``, and how many
        drafts were ``accepted``.
    """
    # Stock's sampler is compiled where it can be, for half a minute.
    stock = {"VLLM_PLUGINS": "vllm_diffusion_cpu", "TORCHDYNAMO_DISABLE": "1"}
    results, _ = run_aside(
        __name__, jobs, timeout=1700, VLLM_ENABLE_V1_MULTIPROCESSING="0", **stock
    )
    return list(results)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest

    adapter = job.pop("adapter", None)
    few = {"max_model_len": 256, "max_num_seqs": 2, "disable_log_stats": False}
    options = small_engine(**(few | job))
    llm, stage = None, "start"
    create = EngineArgs.create_engine_config

    def create_engine_config(*args: Any, **kwargs: Any) -> Any:
        nonlocal stage
        config, stage = create(*args, **kwargs), "load"
        return config

    EngineArgs.create_engine_config = create_engine_config
    try:
        llm, stage = LLM(**options), "request"
        torch.manual_seed(0)
        # A diffusion model of vLLM's takes no temperature.
        temperature = 0.0 if adapter or "speculative_config" in job else 1.0
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature)
        (output,) = llm.generate(
            [{"prompt_token_ids": [2, 50, 60, 70, 80]}],
            params,
            use_tqdm=False,
            lora_request=LoRARequest("one", 1, adapter) if adapter else None,
        )
        counts = {one.name: getattr(one, "value", 0) for one in llm.get_metrics()}
        accepted = counts.get("vllm:spec_decode_num_accepted_tokens", 0)
        return {"tokens": list(output.outputs[0].token_ids), "accepted": accepted}
    except Exception as error:
        return {"stage": stage, "error": f"{type(error).__name__}: {error}"}
    finally:
        EngineArgs.create_engine_config = create
        with suppress(Exception):
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    work_aside(lambda jobs: [_run(job) for job in jobs])
