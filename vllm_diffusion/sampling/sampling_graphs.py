"""Graphs of the functions that a pass launches, for the shapes that were captured.

A pass in which no request uses more than temperatures and seeds, and some canvas may take another
step, is one function, the plain step. Any other pass is sampled in parts, and then decided: its
adjusted rows; of these the rows with filters, a canvas's length of them at a time, or 256; and the
rows with log-probabilities. A part without a graph is called, and then does no more than the pass
uses. The adjusted rows are also called where no canvas takes another step, or where every request
is held to a few ids.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors

from vllm_diffusion.canvas.pass_rows import PassRows, rows_of
from vllm_diffusion.sampling.logprobs import IMPOSSIBLE, no_logprobs
from vllm_diffusion.sampling.sampling_functions import SamplingFunctions
from vllm_diffusion.sampling.used_settings import UsedSettings
from vllm_diffusion.startup.cuda_graphs import (
    MOST_ADJUSTED_CANVASES,
    GraphCall,
    GraphedFunction,
)

# Rows whose logits are held at once: those of DiffusionGemma's canvas.
MOST_ROWS_AGAIN = 256
# Log-probabilities that graphs report; a server that allows more has none of them.
MAX_GRAPHED_LOGPROBS = 32


class SamplingGraphs:
    """Launches of a pass: :attr:`plain_step`, or :meth:`sample` and then :attr:`decide`.

    Attributes:
        eager: The functions, as a pass without graphs calls them.
        plain_step: Of a pass with nothing but temperatures and seeds; this and the next are graphs
            of the functions of the same names.
        adjusted_rows: Of a pass with any adjustments.
        filtered_rows: Of rows with filters.
        reported_rows: Of rows with log-probabilities.
        decide: What becomes of every canvas.
    """

    def __init__(self, pass_rows: PassRows, eager: SamplingFunctions, max_logprobs: int) -> None:
        """Wrap the functions of a pass; nothing is captured yet.

        Args:
            pass_rows: The rows of the pass.
            eager: The functions, as a pass without graphs calls them.
            max_logprobs: Log-probabilities that a request may ask for; -1 for those of all tokens.
        """
        self._pass_rows = pass_rows
        self._settings = eager.settings
        self.eager = eager
        self._max_logprobs = max_logprobs
        self.plain_step = GraphedFunction(eager.plain_step)
        self.adjusted_rows = GraphedFunction(eager.adjusted_rows)
        self.filtered_rows = GraphedFunction(eager.filtered_rows)
        self.reported_rows = GraphedFunction(eager.reported_rows)
        self.decide = GraphedFunction(eager.decide)
        # Hidden rows that graphs read, and the reports that they write, where there are any.
        self._hidden: Tensor | None = None
        self._reports: LogprobsTensors | None = None

    def select_rows(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden_size]: the hidden rows that are sampled, where graphs read them.

        Args:
            hidden_states: [num_tokens, hidden_size], of the pass.
        """
        n, held = self._pass_rows.num_rows, self._hidden
        out = held[:n] if held is not None and n <= len(held) else None
        return torch.index_select(hidden_states, 0, self._pass_rows.hidden_index[:n], out=out)

    def sample(self, rows: Tensor, used: UsedSettings) -> LogprobsTensors | None:
        """Take the statistics of a pass with settings.

        Args:
            rows: [num_rows, hidden_size], from :meth:`select_rows`.
            used: Settings that the pass uses.

        Returns:
            Log-probabilities of each row's token; ``None`` if no request asks.
        """
        # A graph projects onto all ids, and for a next step.
        adjusted_rows = self.eager.adjusted_rows if used.needs_less else self.adjusted_rows
        adjusted_rows(rows, used=used)
        # Graphs look at rows where they were captured.
        is_held = self._hidden is not None and len(rows) <= len(self._hidden)
        filtered_rows = self.filtered_rows if is_held else self.eager.filtered_rows
        for index in self._canvases_of(used.filtered, is_held):
            filtered_rows(index, hidden=rows, used=used)
        if used.reported is None:
            return None
        if used.reports_pinned:
            # What is reported of a position is the token that the answer has there.
            slots, argmax = self._pass_rows.slots, self.eager.statistics.argmax
            torch.where(slots.pinned, slots.canvas, argmax, out=argmax)
        return self._report(rows, used, is_held)

    def graph_calls(self, counts: range, hidden_size: int, dtype: torch.dtype) -> list[GraphCall]:
        """Return the calls of steps of some numbers of whole canvases, and the parts of adjusted
        ones.

        Until they are captured the pass has no rows and no constraints, so that no canvas changes.

        Args:
            counts: The numbers, the largest first: the same one in every call.
            hidden_size: Of hidden rows.
            dtype: Of hidden rows.
        """
        C, everything = self._length, self._settings.all_used(self._max_logprobs)
        if self._hidden is None:
            self._hidden = torch.zeros(
                counts[0] * C, hidden_size, dtype=dtype, device=self._pass_rows.index.device
            )
        hidden = self._hidden
        again = torch.zeros(self.num_again, dtype=torch.int64, device=hidden.device)
        adjusted = sorted({min(n, MOST_ADJUSTED_CANVASES) for n in counts}, reverse=True)
        calls = [GraphCall(self.plain_step, (hidden[: n * C],)) for n in counts]
        calls += [
            GraphCall(self.adjusted_rows, (hidden[: n * C],), {"used": everything})
            for n in adjusted
        ]
        of_some = {"hidden": hidden, "used": everything}
        calls.append(GraphCall(self.filtered_rows, (again,), of_some))
        if 0 <= self._max_logprobs <= MAX_GRAPHED_LOGPROBS:
            if self._reports is None:
                self._reports = no_logprobs(len(hidden), 1 + self._max_logprobs, hidden.device)
            of_some = {**of_some, "reports": self._reports}
            calls.append(GraphCall(self.reported_rows, (again.clone(),), of_some))
        return [*calls, GraphCall(self.decide)]

    def _report(self, rows: Tensor, used: UsedSettings, is_held: bool) -> LogprobsTensors:
        """Log-probabilities of all rows; a row whose request wants none reports nothing.

        Args:
            rows: [num_rows, hidden_size].
            used: Settings that the pass uses.
            is_held: Graphs read the rows.
        """
        num_columns = 1 + max(used.num_top, used.num_named)
        reported_rows: Callable[..., None] = self.reported_rows
        is_graphed = is_held and self.reported_rows.is_captured and used.num_named == 0
        if is_graphed and self._reports is not None:
            reports = rows_of(self._reports, slice(len(rows)))
            reports.logprob_token_ids.zero_()
            reports.logprobs.fill_(IMPOSSIBLE)
            reports.selected_token_ranks.zero_()
        else:
            reported_rows = self.eager.reported_rows
            reports = no_logprobs(len(rows), num_columns, rows.device)
        for index in self._canvases_of(used.reported, is_held):
            reported_rows(index, hidden=rows, used=used, reports=reports)
        # Some requests want fewer than the graph reports.
        return reports._replace(
            logprob_token_ids=reports.logprob_token_ids[:, :num_columns],
            logprobs=reports.logprobs[:, :num_columns],
        )

    def _canvases_of(self, index: np.ndarray | None, is_graphed: bool) -> Sequence[Tensor]:
        """Cut rows into parts that are looked at again at once, on the device.

        Args:
            index: [n], int64, which rows of the pass; ``None`` for none.
            is_graphed: Fill up the last part with the last row: a graph has one shape.
        """
        if index is None:
            return []
        if is_graphed:
            index = np.pad(index, (0, -len(index) % self.num_again), mode="edge")
        return async_tensor_h2d(index, device=self._pass_rows.index.device).split(self.num_again)

    @property
    def num_again(self) -> int:
        """Rows that are looked at again at once: a canvas's, but where it holds a whole sequence;
        on a CPU, where each call costs more than its rows, those of several.
        """
        is_cpu = self._pass_rows.index.device.type == "cpu"
        return MOST_ROWS_AGAIN if is_cpu else min(self._length, MOST_ROWS_AGAIN)

    @property
    def _length(self) -> int:
        """C, positions of a canvas."""
        return self.eager.statistics.argmax.shape[1]
