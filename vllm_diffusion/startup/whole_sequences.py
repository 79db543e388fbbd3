"""Start-up of models whose canvas holds the whole sequence."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

from vllm_diffusion.decoding.layouts import WholeSequence
from vllm_diffusion.startup.masked_models import MaskedEngineConfig
from vllm_diffusion.startup.pass_limits import FEWEST
from vllm_diffusion.startup.plan import plan_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SchedulerConfig, VllmConfig

logger = logging.getLogger("vllm.vllm_diffusion")


class WholeSequenceEngineConfig(MaskedEngineConfig):
    """Base for a family that attends over prompt and answer in both directions.

    Attributes:
        context_length: Tokens of the longest sequence if the operator sets no ``--max-model-len``;
            ``None`` for those that ``config.json`` names.
    """

    layout = WholeSequence
    context_length: ClassVar[int | None] = None

    @classmethod
    def verify_and_update_model_config(cls, model_config: ModelConfig) -> None:
        super().verify_and_update_model_config(model_config)
        most = cls.context_length
        if most is not None and model_config.original_max_model_len in (None, -1):
            model_config.max_model_len = min(model_config.max_model_len, most)
        model_config.hf_config.canvas_length = model_config.max_model_len

    @classmethod
    def apply_stock_defaults(cls, vllm_config: VllmConfig) -> None:
        """Have each pass hold the longest sequence."""
        from vllm.config import CUDAGraphMode
        from vllm.config.diffusion import DiffusionConfig

        model_config, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        most = scheduler.max_num_batched_tokens
        if not plan_of(vllm_config).sets_max_num_batched_tokens:
            scheduler.max_num_batched_tokens = max(most, model_config.max_model_len)
        elif most < model_config.max_model_len:
            logger.info(
                "max_model_len=%d, not %d: a pass runs the whole sequence, and --max-num-batched-tokens is %d.",
                most,
                model_config.max_model_len,
                most,
            )
            model_config.max_model_len = most
        compilation = vllm_config.compilation_config
        if compilation.cudagraph_mode != CUDAGraphMode.NONE:
            # Attention reads how long each sequence is; the rest is the same for any that fill the
            # rows.
            compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        model_config.hf_config.canvas_length = model_config.max_model_len
        canvases = vllm_config.diffusion_config or DiffusionConfig(canvas_length=1)
        canvases.canvas_length = model_config.max_model_len
        vllm_config.diffusion_config = canvases

    @classmethod
    def default_max_num_seqs(cls, scheduler: SchedulerConfig, most: int, length: int) -> int:
        chosen = min(most, FEWEST)
        logger.info(
            "max_num_seqs=%d: a pass of max_num_batched_tokens=%d holds that many sequences or fewer; "
            "--max-num-seqs sets another number.",
            chosen,
            scheduler.max_num_batched_tokens,
        )
        return chosen
