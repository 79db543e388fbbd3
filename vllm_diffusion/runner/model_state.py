"""Model state of block-diffusion models, which the model runner calls; it knows no architecture.

A model names it in ``get_model_state_cls()``, or a subclass that embeds canvases in its own way.
The :class:`CanvasSpec` that start-up chose describes its canvases.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_diffusion.attention.metadata import bind_canvas
from vllm_diffusion.canvas.pass_rows import PassRows
from vllm_diffusion.canvas.slots import CanvasSlots, NewRequest
from vllm_diffusion.canvas.step import CanvasStep
from vllm_diffusion.sampling.output_head import OutputHead, head_of
from vllm_diffusion.sampling.sampler import DiffusionSampler
from vllm_diffusion.startup.cuda_graphs import (
    MOST_ADJUSTED_CANVASES,
    CanvasGraphs,
    GraphCall,
    most_canvases,
)
from vllm_diffusion.startup.machine import compile_backend, launch_backend
from vllm_diffusion.startup.plan import plan_of
from vllm_diffusion.weights.formats import describe_kernels

logger = init_logger(f"vllm.{__name__}")


class BlockDiffusionModelState(ModelState):
    """Canvases, causal rows and the sampler of a block-diffusion model."""

    # A canvas's rows are all draft tokens; there is no extra token per step.
    num_new_sampled_tokens_per_step: int = 0
    # [R, C, hidden_size]: what self-conditioning needs of each canvas position, where a model has
    # it.
    soft_embeds: Tensor | None = None
    # Made with the model runner, before its first request.
    sampler: DiffusionSampler

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: Any,
        device: torch.device,
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        plan = plan_of(vllm_config)
        self.vocab_size: int = self.model_config.get_vocab_size()
        if plan.spec is None:
            raise ValueError(
                f"{type(model).__name__} has no start-up checks of vllm-diffusion, which choose its "
                "scheduler: under another one it would be served wrongly. Register a "
                "BlockDiffusionEngineConfig for its architecture (families/registry.py)."
            )
        self.settings = plan.settings
        self._order_of = partial(plan.order, vllm_config.scheduler_config.async_scheduling)
        self.slots = CanvasSlots(self.max_num_reqs, plan.spec, self.vocab_size, device)
        self.spec = self.slots.spec
        self.canvas_length = self.spec.length
        self._slot_of_request: dict[str, int] = {}
        self.pass_rows = PassRows(self.slots, self.max_num_tokens, launch_backend(vllm_config))
        self._spans = torch.zeros(self.max_num_tokens, 2, dtype=torch.int32, device=device)
        # There is none where a canvas is as long as a sequence.
        length = self.canvas_length
        most = min(self.max_num_reqs, most_canvases(length), self.max_num_tokens // length)
        self.graphs = CanvasGraphs(most if self.spec.layout.has_one_length else 0, self.graph_calls)
        self._log_who_serves()

    # What a family defines.

    def output_head(self) -> OutputHead:
        """The projection onto the vocabulary."""
        return head_of(self.model, never_drawn=self.spec.never_drawn)

    def store_soft_embeds(self, soft_embeds: Tensor, slot: Tensor, position: Tensor) -> None:
        """Keep what self-conditioning needs of this step, if the head has an embedding.

        Args:
            soft_embeds: [num_rows, hidden_size], float32: embeddings by probability.
            slot: [num_rows], int64.
            position: [num_rows], int64.
        """
        raise NotImplementedError

    def row_spans(self, input_batch: InputBatch, num_tokens: int) -> Tensor | None:
        """Return the span that each causal row attends in both directions, if rows have spans.

        Args:
            input_batch: Batch of the pass.
            num_tokens: Rows that attention is given: those of the batch, or of the graph that is
                replayed for it where attention is in the graph.

        Returns:
            [num_tokens, 2], int32, at an address that does not change between passes.
        """
        return self.spec.layout.row_spans(
            input_batch.positions[:num_tokens],
            self._spans[:num_tokens],
            lambda: self.pass_rows.num_known(num_tokens),
        )

    # What the model runner calls.

    def custom_sampler(self, sampler: Any) -> tuple[DiffusionSampler, None]:
        step = CanvasStep(
            self.slots,
            converge_at_end=self.settings.converge_at_end,
            commits=lambda way: self._order_of(way).commits,
            compile_backend=compile_backend(self.vllm_config),
        )
        ours = DiffusionSampler(
            sampler,
            self.pass_rows,
            step,
            self.output_head(),
            self.store_soft_embeds,
            self.model_config.max_logprobs,
        )
        self.sampler = ours
        return ours, None

    def capture_inner_cudagraphs(self, *batch_layout: Any) -> None:
        """Called by the runner when it has captured the backbone."""
        graphs = self.graphs
        graphs.capture_on(self.device)
        if graphs.most == 0 or graphs.is_sample:
            return
        logger.info_once(
            "CUDA graphs: %s for 1 to %d canvases, with other sampling settings for 1 to %d, the "
            "backbone for passes of %s rows; narrow canvases and larger passes launch kernels one by "
            "one. vLLM reports their memory below.",
            "sampling"
            if self.soft_embeds is None
            else "embedding with self-conditioning and sampling",
            graphs.most,
            min(graphs.most, MOST_ADJUSTED_CANVASES),
            # What is logged once is remembered, which a list cannot be.
            tuple(self.vllm_config.compilation_config.cudagraph_capture_sizes or ()),
        )

    def graph_calls(self, counts: range) -> list[GraphCall]:
        """Return what a pass does besides the backbone, for some numbers of canvases.

        Args:
            counts: The numbers, the largest first.
        """
        return self.sampler.graph_calls(counts, self.model_config.get_hidden_size(), self.dtype)

    def _log_who_serves(self) -> None:
        """One line, so that nobody has to guess whether stock or this package serves."""
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        backends = {
            f"{backend.__module__}.{backend.__qualname__}"
            for backend in (getattr(layer, "attn_backend", None) for layer in layers)
            if backend is not None
        }
        scheduler = str(self.vllm_config.scheduler_config.scheduler_cls)
        order = "async" if self.vllm_config.scheduler_config.async_scheduling else "sync"
        encode = "fused with the next canvas" if self._order_of().encode_with_step else "separate"
        if self.spec.layout.recomputes:
            encode = "never"
        logger.info_once(
            "vllm-diffusion serves this model: model %s, sampler %s, attention %s, scheduler %s "
            "(%s, encode %s)",
            type(self.model).__name__,
            DiffusionSampler.__name__,
            ", ".join(sorted(backends)),
            scheduler.rpartition(".")[2],
            order,
            encode,
        )
        if self.vllm_config.quant_config is not None:
            logger.info_once("quantised layers: %s", describe_kernels(self.model))

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        self._slot_of_request[new_req_data.req_id] = req_index
        self.slots.add_request(req_index, NewRequest.of(new_req_data, self.spec))

    def remove_request(self, req_id: str) -> None:
        slot = self._slot_of_request.pop(req_id, None)
        if slot is not None:
            self.slots.remove_request(slot)
            self.sampler.remove_request(slot)

    def apply_staged_writes(self) -> None:
        self.slots.apply_staged_writes()

    def prepare_inputs_embeds(
        self,
        scheduled_encoder_inputs: dict[str, list[int]],
        input_batch: InputBatch,
        req_states: RequestState,
    ) -> Tensor | None:
        return None

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        """Put the pass's token ids into the batch."""
        self._fill_ids(input_batch, req_states)
        return {}

    def _fill_ids(self, input_batch: InputBatch, req_states: RequestState) -> None:
        self.pass_rows.fill_ids(
            input_batch, req_states.all_token_ids.gpu, req_states.num_computed_tokens.gpu
        )

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        return {}

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[Tensor, ...],
        slot_mappings: Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        ubatch_idx: int = 0,
    ) -> dict[str, Any]:
        if cudagraph_mode == CUDAGraphMode.FULL:
            num_reqs = input_batch.num_reqs_after_padding
            num_tokens = input_batch.num_tokens_after_padding
        else:
            num_reqs = input_batch.num_reqs
            num_tokens = input_batch.num_tokens
        pass_rows = self.pass_rows
        pass_rows.lay_out(input_batch)
        attn_metadata = build_attn_metadata(
            attn_groups=attn_groups,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            query_start_loc_gpu=input_batch.query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=torch.from_numpy(input_batch.query_start_loc_np[: num_reqs + 1]),
            max_query_len=int(input_batch.num_scheduled_tokens.max()),
            seq_lens=input_batch.seq_lens,
            # A captured graph is replayed at any length.
            max_seq_len=(
                self.max_model_len
                if for_capture
                else int(input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy().max())
            ),
            block_tables=block_tables,
            slot_mappings=slot_mappings,
            kv_cache_config=kv_cache_config,
            seq_lens_cpu_upper_bound=input_batch.seq_lens_cpu_upper_bound,
            for_cudagraph_capture=for_capture,
            causal=pass_rows.causal_flags[:num_reqs],
        )
        return bind_canvas(
            attn_metadata,
            pass_rows.num_causal[:num_reqs],
            self.row_spans(input_batch, num_tokens),
            self.settings.window_anchor,
        )
