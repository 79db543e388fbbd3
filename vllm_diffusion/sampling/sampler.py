"""The sampler that the model runner calls after each forward pass.

The runner's calls, in their order, with what each of them needs:

1. ``add_request`` and ``remove_request`` of the model state, then of the sampler, for requests that
   come and go, and ``apply_staged_writes`` of both: settings and first canvases are on the device.
2. ``prepare_attn`` of the model state: :meth:`PassRows.lay_out` places the rows of the pass.
   All that follows reads them.
3. ``prepare_inputs`` of the model state, which fills in canvases, and the forward pass.
4. :meth:`DiffusionSampler.select_rows`: hidden rows of the pass that are sampled.
5. :meth:`DiffusionSampler.__call__`: statistics of the rows, the rule's decision, committed tokens.
6. ``views.prepare_output``: canvases that are watched or constrained, as step 5 left them.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from attention_kernels.vocab_statistics import LogitAdjustments, RowDraws, RowLogits
from vllm_diffusion.canvas.messages import CanvasGrammarOutput
from vllm_diffusion.canvas.pass_rows import PassRows, rows_of
from vllm_diffusion.canvas.step import CanvasStep, StepOutput
from vllm_diffusion.requests.arguments import arguments_of
from vllm_diffusion.sampling.candidate_filters import CandidateFilters, draw_filtered
from vllm_diffusion.sampling.canvas_views import CanvasViewConnector
from vllm_diffusion.sampling.logprobs import EmittedLogprobs, LogprobsRequest, row_logprobs
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.pass_settings import PassSettings
from vllm_diffusion.sampling.row_adjustments import RowAdjustments, TokenMasks
from vllm_diffusion.sampling.sampling_functions import SamplingFunctions, StoreSoftEmbeds
from vllm_diffusion.sampling.sampling_graphs import SamplingGraphs
from vllm_diffusion.sampling.thought_ends import ThoughtEnds
from vllm_diffusion.sampling.vocabulary_stream import sample_rows
from vllm_diffusion.startup.cuda_graphs import GraphCall


class DiffusionSampler:
    """One denoising step: rows -> statistics -> rule -> committed tokens -> engine output.

    Nothing here reads a value from the device.

    Attributes:
        penalties_state: vLLM's, in which its runner counts committed tokens.
        views: The runner's connector for outputs other than tokens.
    """

    def __init__(
        self,
        stock_sampler: Any,
        pass_rows: PassRows,
        canvas_step: CanvasStep,
        head: OutputHead,
        store_soft_embeds: StoreSoftEmbeds,
        max_logprobs: int,
    ) -> None:
        """Bind the sampler to a model.

        Args:
            stock_sampler: vLLM's sampler, whose per-request states are reused.
            pass_rows: The rows of the pass; laid out before each call.
            canvas_step: Decides what becomes of the canvases.
            head: The projection onto the vocabulary.
            store_soft_embeds: Keeps what self-conditioning needs; called if ``head`` has an
                embedding.
            max_logprobs: Log-probabilities that a request may ask for; -1 for those of all tokens.
        """
        slots = pass_rows.slots
        self.slots = slots
        self.pass_rows = pass_rows
        self.head = head
        self.penalties_state = stock_sampler.penalties_state
        self.token_masks = TokenMasks(pass_rows, slots.vocab_size)
        self.adjustments = RowAdjustments(
            stock_sampler,
            self.token_masks,
            slots.vocab_size,
            ThoughtEnds(slots) if any(rule.ends_thoughts for rule in slots.spec.rules) else None,
        )
        self.settings = PassSettings(
            stock_sampler, pass_rows, self.adjustments, self_conditions=head.embedding is not None
        )
        functions = SamplingFunctions(
            pass_rows, self.settings, head, self.token_masks, store_soft_embeds, canvas_step
        )
        self._num_likeliest = functions.statistics.num_likeliest
        self.graphs = SamplingGraphs(pass_rows, functions, max_logprobs)
        self.emitted_logprobs = EmittedLogprobs(pass_rows)
        self.views = CanvasViewConnector(
            slots, pass_rows.of_slots.num_rows, functions.statistics.entropy
        )

    # Before a pass.

    def add_request(self, slot: int, sampling_params: Any) -> None:
        """Stage the settings of ``slot``'s new owner, which the model state has seen before."""
        self.settings.add_request(slot, sampling_params)
        readable = self.slots.features.allowed_ids.get(slot)
        spec = self.slots.spec
        arguments = arguments_of(sampling_params)
        rule = spec.ways[arguments.way].rule
        forbidden = rule.forbidden(spec.all_settings(arguments.settings))
        self.adjustments.add_request(slot, sampling_params, readable, forbidden)

    def remove_request(self, slot: int) -> None:
        """Forget what the host keeps of a slot; vLLM's states are rewritten by the next owner."""
        self.adjustments.remove_request(slot)

    def apply_staged_writes(self) -> None:
        """Copy the settings of new requests to the device, if there are any."""
        self.settings.apply_staged_writes()
        self.adjustments.apply_staged_writes()

    # After the forward pass.

    def select_rows(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden_size]: the hidden rows that are sampled.

        Args:
            hidden_states: [num_tokens, hidden_size], of the pass.
        """
        return self.graphs.select_rows(hidden_states)

    def __call__(
        self, rows: Tensor, input_batch: InputBatch, message: GrammarOutput | None = None
    ) -> SamplerOutput:
        """Sample one pass of the whole batch.

        Args:
            rows: [num_rows, hidden_size], hidden states: see :meth:`select_rows`.
            input_batch: The batch that ran.
            message: Constraints of our scheduler. vLLM's warm-up sends a plain message, which
                constrains nothing.
        """
        self.views.begin_pass()
        if len(rows) == 0:
            return self._engine_output(self.graphs.decide(), None)
        num_masks = None
        if isinstance(message, CanvasGrammarOutput):
            num_masks = self.token_masks.take(message, input_batch.req_ids)
        used = self.settings.used(num_masks)
        if used.is_plain:
            return self._engine_output(self.graphs.plain_step(rows), None)

        if num_masks is None:
            self.token_masks.clear()
        self.adjustments.place_thought_ends()
        if used.reported is not None:
            self.emitted_logprobs.begin_pass()
        logprobs = self.graphs.sample(rows, used)
        step = self.graphs.decide()
        if logprobs is not None:
            logprobs = self.emitted_logprobs.exchange(logprobs, step)
        return self._engine_output(step, logprobs)

    def _engine_output(self, step: StepOutput, logprobs: LogprobsTensors | None) -> SamplerOutput:
        self.views.keep(step)
        self.slots.predictions.apply(self.slots.canvas, step.tokens, step.num_emitted)
        by_request = self.pass_rows.for_engine(step)
        return SamplerOutput(
            sampled_token_ids=by_request.tokens,
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=by_request.num_sampled,
            num_rejected=by_request.num_rejected,
        )

    # At start-up.

    def graph_calls(self, counts: range, hidden_size: int, dtype: torch.dtype) -> list[GraphCall]:
        """Begin a pass without rows, and return its calls: see
        :meth:`SamplingGraphs.graph_calls`.
        """
        self._lay_out_nothing()
        return self.graphs.graph_calls(counts, hidden_size, dtype)

    def compile_step(self) -> None:
        """Compile what decides about canvases, for which the first request would wait."""
        self._lay_out_nothing()
        self.graphs.decide()

    def _lay_out_nothing(self) -> None:
        """Begin a pass that changes no canvas: no slot has rows or a constraint."""
        self.token_masks.clear()
        self.pass_rows.clear()

    def profile(self, rows: Tensor) -> None:
        """Allocate what the largest pass would, for the engine's memory profile.

        Args:
            rows: [num_rows, hidden_size], any hidden states.
        """
        length = self.slots.canvas_length
        most = min(len(self.pass_rows.index), self.slots.num_slots * length)
        self._profile_rows(rows[:1].repeat(most, 1), None)
        # A few rows compile the kernels as they are with adjustments.
        few = min(most, length)
        self._profile_rows(rows[:1].repeat(few, 1), self.adjustments.none(few))

    def _profile_rows(self, rows: Tensor, adjustments: LogitAdjustments | None) -> None:
        head, vocab_size = self.head, self.slots.vocab_size
        ones = torch.ones(len(rows), device=rows.device)
        zeros = torch.zeros(len(rows), dtype=torch.int32, device=rows.device)
        draws = RowDraws(ones, ones, zeros.long(), zeros, zeros, zeros)
        sample_rows(head, rows, draws, adjustments, self._num_likeliest)
        if head.embedding is not None:
            # The kernel of a pass without a next step.
            alone, one = replace(head, embedding=None), slice(1)
            of_one = None if adjustments is None else adjustments.rows(one)
            sample_rows(alone, rows[one], rows_of(draws, one), of_one, self._num_likeliest)
        # With filters and log-probabilities rows are looked at again.
        some = slice(self.graphs.num_again)
        ones, zeros, draws = ones[some], zeros[some], rows_of(draws, some)
        logits = RowLogits(head.project_all(rows[some]), head.first_id, head.softcap, adjustments)
        draw_filtered(
            head, logits, draws, CandidateFilters(zeros + 1, ones / 2, ones / 2), vocab_size
        )
        wanted = LogprobsRequest(1, zeros.long()[:, None][:, :0], zeros, as_logits=False)
        row_logprobs(logits, ones, zeros.long(), wanted, head)
