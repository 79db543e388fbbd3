"""Checks and choices for drafts where the CPU platform serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_drafts(vllm_config: VllmConfig) -> None:
    """Refuse drafts that the CPU does not run, and choose how hidden states are extracted.

    Raises:
        ValueError: Naming the option and the remedy.
    """
    transfer, spec = vllm_config.kv_transfer_config, vllm_config.speculative_config
    if transfer is not None and transfer.kv_connector == "ExampleHiddenStatesConnector":
        transfer.kv_connector = "CpuHiddenStatesConnector"
        transfer.kv_connector_module_path = "vllm_diffusion.drafting.cpu_kernels.hidden_states"
    if spec is None:
        return
    if spec.rejection_sample_method == "fly":
        raise ValueError(
            '--speculative-config: rejection_sample_method "fly" changes what the model answers, '
            'and does not run on the CPU platform of vllm-diffusion; leave it out, or set it to "block".'
        )
    is_staged = vllm_config.parallel_config.pipeline_parallel_size > 1
    if is_staged and not vllm_config.scheduler_config.async_scheduling:
        # vLLM's synchronous scheduler gets the drafts of a step before it knows the tokens of that
        # step, and asks the first stage for fewer tokens than it verifies.
        raise ValueError(
            "--pipeline-parallel-size with --speculative-config does not run with --no-async-scheduling, "
            "with which drafts do not reach vLLM's stages in time; leave --no-async-scheduling out."
        )
    if is_staged and spec.method == "draft_model":
        # Its first layers lie in a stage that never drafts.
        raise ValueError(
            "--pipeline-parallel-size with --speculative-config: vLLM cuts a draft of method draft_model into "
            "stages as well, but drafts only in the last one; leave --pipeline-parallel-size out, use "
            '--tensor-parallel-size, or set "method" to "ngram", "dflash" or "eagle3".'
        )
    # vLLM would find out when weights are loaded.
    reads_states = spec.method in ("dflash", "dspark", "eagle3", "extract_hidden_states")
    model_type = vllm_config.model_config.hf_text_config.model_type
    if is_staged and reads_states and model_type in ("gemma4", "gemma4_text"):
        raise ValueError(
            f"--pipeline-parallel-size with --speculative-config: {spec.method} reads hidden states of layers, "
            "which vLLM's Gemma 4 does not pass from stage to stage; leave --pipeline-parallel-size out, "
            'use --tensor-parallel-size, or set "method" to "ngram".'
        )
    if vllm_config.watermark_config is not None:
        raise ValueError(
            "--watermark-config with --speculative-config does not run on the CPU platform of "
            "vllm-diffusion; leave one of them out."
        )
