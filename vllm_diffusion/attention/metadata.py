"""Metadata of a step for :func:`canvas_attention`, made of the engine's batch.

A batch of a diffusion model comes with ``causal_rows`` (see :func:`bind_canvas`); for any other
model, and for stock's own diffusion class, the engine's causal flag is widened to rows here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from attention_kernels.canvas_attention import Planned, Sequences, WindowAnchor
from vllm_diffusion.attention.warm_up import ATTENTION_VARIANTS
from vllm_diffusion.startup.plan import plan_of, spec_of


@dataclass(frozen=True)
class CanvasAttentionMetadata:
    """Batch of one step for :func:`canvas_attention`.

    Attributes:
        sequences: Sequences of the requests.
        num_tokens: Rows of the batch, without padding.
        window_anchor: ``"canvas"`` or ``"query"``.
        positions: [num_tokens], integer, of each row in its sequence; ``None`` for a canvas model.
        plans: Launch plan of the step for each kind of layer, made by the first layer of the kind.
    """

    sequences: Sequences
    num_tokens: int
    window_anchor: WindowAnchor
    positions: Tensor | None = None
    plans: dict[Any, Planned] = field(init=False, default_factory=dict, repr=False)

    def spans_within(self, window: int) -> Tensor | None:
        """The image span of each row, as far as a layer of Gemma 4 attends in both directions.

        That is within the window of the row, and nowhere in a layer without a window.

        Args:
            window: Keys that a row sees before itself; -1 for all of them.

        Returns:
            [num_tokens, 2], int32, or ``None`` where no row has a span.
        """
        spans = self.sequences.row_spans
        if spans is None or window < 0:
            return None
        assert self.positions is not None
        start, end = spans.unbind(1)
        # A row outside of any image has the span (0, 0).
        first = torch.minimum(torch.maximum(start, self.positions - window), end)
        return torch.stack([first, end], dim=1).to(torch.int32)


def bind_canvas(
    attn_metadata: dict[str, Any],
    causal_rows: Tensor,
    row_spans: Tensor | None,
    window_anchor: WindowAnchor,
) -> dict[str, Any]:
    """Give each layer's metadata the rows and spans that the engine's interface cannot carry.

    Args:
        attn_metadata: Result of ``build_attn_metadata``, metadata by layer name.
        causal_rows: [num_reqs], int32, at an address that does not change between steps.
        row_spans: [num_tokens, 2], int32, or ``None``.
        window_anchor: ``"canvas"`` or ``"query"``.

    Returns:
        The same mapping with our metadata replaced; that of other back ends is left as it is.
    """
    replaced: dict[int, CanvasAttentionMetadata] = {}
    bound = {}
    for layer_name, metadata in attn_metadata.items():
        if isinstance(metadata, CanvasAttentionMetadata):
            if id(metadata) not in replaced:
                sequences = replace(
                    metadata.sequences, causal_rows=causal_rows, row_spans=row_spans
                )
                replaced[id(metadata)] = replace(
                    metadata, sequences=sequences, window_anchor=window_anchor
                )
            bound[layer_name] = replaced[id(metadata)]
        else:
            bound[layer_name] = metadata
    return bound


class CanvasAttentionMetadataBuilder(AttentionMetadataBuilder[CanvasAttentionMetadata]):
    """Turns the engine's batch into :class:`CanvasAttentionMetadata`."""

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """Any batch without images can be captured: what varies is read from the device.

        Image spans come and go with the prompts, and a kernel is captured either with or without
        them, so where there may be images only batches without prompts are captured. No graph holds
        the reference, which reads the batch on the host.
        """
        if plan_of(vllm_config).settings.attention == "reference":
            return AttentionCGSupport.NEVER
        if vllm_config.model_config.is_mm_prefix_lm:
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Our model states say which rows are causal themselves (bind_canvas).
        self._is_bound = spec_of(vllm_config.model_config) is not None
        ATTENTION_VARIANTS.register_warmup(layer_names, vllm_config)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CanvasAttentionMetadata:
        common = common_attn_metadata
        is_bound = self._is_bound and isinstance(common.causal, Tensor)
        causal_rows = common.causal if is_bound else _causal_rows_of_flags(common)
        spans = None
        if common.mm_req_doc_ranges:
            spans = _row_spans_of_requests(common)
        sequences = Sequences(
            common.block_table_tensor,
            common.query_start_loc,
            common.seq_lens,
            causal_rows,
            spans,
            common.max_query_len,
            common.max_seq_len,
        )
        return CanvasAttentionMetadata(
            sequences,
            num_tokens=common.num_actual_tokens,
            # A flag per request is stock's contract, and its window follows the query row.
            window_anchor="query",
            positions=None if spans is None else common.positions[: common.num_actual_tokens],
        )


def _causal_rows_of_flags(common: CommonAttentionMetadata) -> Tensor:
    """[num_reqs], int32: causal rows by the engine's flags: all of a request's rows, or none."""
    query_lens = common.query_start_loc[1:] - common.query_start_loc[:-1]
    if isinstance(common.causal, Tensor):
        # The rows past the last request are padding of the engine's buffer.
        return (query_lens * (common.causal[: query_lens.shape[0]] != 0)).to(torch.int32)
    return (query_lens if common.causal else torch.zeros_like(query_lens)).to(torch.int32)


def _row_spans_of_requests(common: CommonAttentionMetadata) -> Tensor:
    """The image span of each row from the engine's inclusive (first, last) position ranges.

    Returns:
        [num_actual_tokens, 2], int32, half-open; (0, 0) for a row in no span.
    """
    starts = common.query_start_loc_cpu.tolist()
    assert common.seq_lens_cpu_upper_bound is not None
    lens = common.seq_lens_cpu_upper_bound.tolist()
    spans = np.zeros((common.num_actual_tokens, 2), dtype=np.int32)
    for request_idx, ranges in (common.mm_req_doc_ranges or {}).items():
        rows = slice(starts[request_idx], starts[request_idx + 1])
        write_image_spans(spans[rows], lens[request_idx] - (rows.stop - rows.start), ranges)
    return torch.from_numpy(spans).to(common.seq_lens.device, non_blocking=True)


def write_image_spans(
    spans: np.ndarray, first_position: int, ranges: Iterable[tuple[int, int]]
) -> None:
    """Write the image span of each row of a request that lies in one.

    Args:
        spans: [num_rows, 2], int32, half-open; of the request's rows.
        first_position: Position of the first of them.
        ranges: First and last position of each image.
    """
    for first, last in ranges:
        rows = slice(max(first - first_position, 0), max(last + 1 - first_position, 0))
        spans[rows] = first, last + 1
