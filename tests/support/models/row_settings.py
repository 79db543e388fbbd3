"""Rows of canvases with their requests' sampling settings, made without an engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from attention_kernels.vocab_statistics import LogitAdjustments, RowDraws, RowLogits
from tests.support.models.heads import output_head
from vllm_diffusion.canvas.pass_rows import rows_of
from vllm_diffusion.decoding.rule import PositionStatistics
from vllm_diffusion.sampling.candidate_filters import CandidateFilters, draw_filtered
from vllm_diffusion.sampling.logprobs import LogprobsRequest, no_logprobs, row_logprobs, write_rows
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.row_adjustments import RowAdjustments
from vllm_diffusion.sampling.vocabulary_stream import sample_rows


def row_draws(rows: int, temperature: float = 1.0, seeds: torch.Tensor | None = None) -> RowDraws:
    zeros = torch.zeros(rows, dtype=torch.int32)
    return RowDraws(
        torch.ones(rows),
        torch.full((rows,), temperature),
        torch.arange(rows) if seeds is None else seeds,
        zeros,
        zeros,
        torch.arange(rows, dtype=torch.int32),
    )


def logits_of(
    head: OutputHead, rows: torch.Tensor, adjustments: LogitAdjustments | None = None
) -> RowLogits:
    """Return logits of rows that are projected again."""
    return RowLogits(head.project_all(rows), head.first_id, head.softcap, adjustments)


def top_logprobs(num_top: int, rows: int, as_logits: bool = False) -> LogprobsRequest:
    """Return the likeliest tokens of each row with their log-probabilities."""
    nothing = torch.zeros(rows, 0, dtype=torch.int64)
    return LogprobsRequest(num_top, nothing, torch.zeros(rows, dtype=torch.int32), as_logits)


def all_filters(top_k: Any, top_p: Any, min_p: Any) -> CandidateFilters:
    return CandidateFilters(*(torch.as_tensor(values) for values in (top_k, top_p, min_p)))


def filtered_probs(
    logits: torch.Tensor, divisor: torch.Tensor, filters: CandidateFilters
) -> torch.Tensor:
    """The candidate's distribution by definition: whole rows, sorted.

    Args:
        logits: [num_rows, vocab_size], float64.
        divisor: [num_rows], float64.
        filters: One entry per row.
    """
    probs = (logits / divisor[:, None]).softmax(-1)
    if filters.min_p is not None:
        floor = filters.min_p.double()[:, None] * probs.amax(-1, keepdim=True)
        probs = torch.where(probs >= floor, probs, 0.0)
    if filters.top_k is not None:
        least = probs.sort(dim=1, descending=True)[0].gather(1, filters.top_k[:, None] - 1)
        probs = torch.where(probs >= least, probs, 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    if filters.top_p is not None:
        ordered, order = probs.sort(dim=1, descending=True)
        kept = ordered.cumsum(-1) - ordered < filters.top_p.double()[:, None]
        probs = torch.zeros_like(probs).scatter(1, order, torch.where(kept, ordered, 0.0))
    return probs / probs.sum(-1, keepdim=True)


class Case:
    """Rows of several requests that use every setting at once."""

    def __init__(self, seed: int, vocab: int, hidden: int = 8) -> None:
        generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.vocab = vocab
        self.weight = torch.randn(vocab, hidden, generator=generator)
        n = 12
        self.rows = torch.randn(n, hidden, generator=generator)
        draws = row_draws(n, seeds=torch.randint(0, 2**62, (n,), generator=generator))
        temperatures = torch.rand(n, generator=generator) * 1.5
        temperatures[:2] = 0.0
        self.adjustments, readable = self._adjustments(rng)
        # Rows with a filter, with log-probabilities, with both and with neither, at both ends.
        self.filtered = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9])
        self.reported = torch.tensor([1, 2, 3, 4, 8, 11])
        f, r = len(self.filtered), len(self.reported)
        self.draws = draws._replace(
            temperature=torch.rand(n, generator=generator) + 0.3, request_temperature=temperatures
        )
        self.filters = all_filters(
            torch.randint(1, vocab + 1, (f,), generator=generator),
            torch.rand(f, generator=generator).clamp(min=0.1),
            torch.rand(f, generator=generator) * 0.2,
        )
        self.request = LogprobsRequest(
            min(3, vocab),
            torch.randint(0, vocab, (r, 4), generator=generator),
            torch.tensor([0, 2, 4] * (r // 3), dtype=torch.int32),
            as_logits=False,
        )
        self.reported_adjustments = readable if seed % 2 else self.adjustments
        self.reported_temperature = torch.rand(r, generator=generator) + 0.5

    def _adjustments(self, rng: np.random.Generator) -> tuple[LogitAdjustments, LogitAdjustments]:
        """Return three requests of four rows: penalties, bias and length, and allowed ids."""
        adjustments = row_adjustments(fake_penalties(3, self.vocab, rng), self.vocab)
        some = rng.integers(0, self.vocab, 10).tolist()
        for slot, (params, readable) in enumerate(
            (
                ({"has_penalties": True}, None),
                ({"logit_bias": dict.fromkeys(some, 1.5), "min_tokens": 4}, None),
                ({"allowed_token_ids": some}, tuple(some[:6])),
            )
        ):
            params = sampling_params(all_stop_token_ids=some[:3], **params)
            adjustments.add_request(slot, params, readable)
        assert adjustments.has_readable(np.arange(3))
        slot = torch.arange(3).repeat_interleave(4)
        return bind(adjustments, [4, 4, 4]), adjustments.bind_readable(slot)

    def run(self, head: Any = None, tile: int = 4096) -> tuple[PositionStatistics, LogprobsTensors]:
        """Return results with candidates of filtered rows, and log-probabilities of all rows."""
        head = head or output_head(self.weight, 5.0)
        results, some = self.run_plain(head, tile), self.filtered
        drawn = draw_filtered(
            head,
            logits_of(head, self.rows[some], self.adjustments.rows(some)),
            rows_of(self.draws, some),
            self.filters,
            self.vocab,
        )
        results = results._replace(
            candidate=results.candidate.index_copy(0, some, drawn[0]),
            drawn_confidence=results.drawn_confidence.index_copy(0, some, drawn[1]),
        )
        some = self.reported
        reports = no_logprobs(len(self.rows), self.request.num_columns, self.rows.device)
        computed = row_logprobs(
            logits_of(head, self.rows[some], self.reported_adjustments.rows(some)),
            self.reported_temperature,
            results.argmax[some],
            self.request,
            head,
        )
        write_rows(reports, some, computed)
        return results, reports

    def run_plain(self, head: Any = None, tile: int = 4096) -> PositionStatistics:
        """Return results of all rows before some are projected again."""
        head = head or output_head(self.weight, 5.0)
        return sample_rows(head, self.rows, self.draws, self.adjustments, 0, tile)


def sampling_params(**changes: Any) -> SimpleNamespace:
    defaults = {
        "logit_bias": None,
        "min_tokens": 0,
        "all_stop_token_ids": set(),
        "allowed_token_ids": None,
        "has_penalties": False,
        "extra_args": None,
    }
    return SimpleNamespace(**(defaults | changes))


def row_adjustments(penalties: Any, vocab: int, prompt_len: int = 5) -> RowAdjustments:
    num_slots = len(penalties.output_bin_counts)
    sampler = SimpleNamespace(
        penalties_state=penalties,
        req_states=SimpleNamespace(prompt_len=SimpleNamespace(np=np.full(num_slots, prompt_len))),
    )
    masks = torch.zeros(num_slots, -(-vocab // 32), dtype=torch.int32)
    return RowAdjustments(sampler, SimpleNamespace(masks=masks), vocab)


def bind(adjustments: RowAdjustments, rows: list[int]) -> LogitAdjustments:
    """Bind requests with so many canvas rows each, in slots and at positions 0, 1, ..."""
    adjustments.apply_staged_writes()
    slot = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))
    used = adjustments.used_by(np.arange(len(rows)), None)
    n = len(slot)
    return adjustments.bind(used, slice(n), slot, torch.arange(n))


def fake_penalties(slots: int, vocab: int, rng: np.random.Generator) -> Any:
    """Return vLLM's tensors of counted tokens, filled at random."""

    def per_slot(value: float) -> Any:
        return SimpleNamespace(gpu=torch.full((slots,), value))

    words = rng.integers(-(2**31), 2**31, (slots, (vocab + 31) // 32))
    return SimpleNamespace(
        add_request=lambda slot, params: params.has_penalties,
        apply_staged_writes=lambda: None,
        repetition_penalty=per_slot(1.7),
        frequency_penalty=per_slot(0.4),
        presence_penalty=per_slot(-0.6),
        prompt_bin_mask=torch.from_numpy(words.astype(np.int32)),
        output_bin_counts=torch.from_numpy(rng.integers(0, 3, (slots, vocab), dtype=np.int32)),
    )
