"""What a rule reads of each row besides its candidate: the likeliest tokens, and the probabilities
of named ones.
"""

import torch
from torch import Tensor

from attention_kernels.vocab_statistics import (
    RowLogits,
    RunningStatistics,
    drawn_share,
    scaled_logits,
)
from vllm_diffusion.sampling.logprobs import IMPOSSIBLE
from vllm_diffusion.sampling.output_head import OutputHead


class RunningChoices:
    """The likeliest tokens of the tiles so far, for rules that look beyond the likeliest one."""

    def __init__(self, num_rows: int, num_likeliest: int, device: torch.device) -> None:
        self._scores = torch.full((num_rows, num_likeliest), IMPOSSIBLE, device=device)
        self._ids = torch.zeros(num_rows, num_likeliest, dtype=torch.int64, device=device)

    def update(self, rows: RowLogits, divisor: Tensor) -> None:
        """Take one tile, in ascending order of ids.

        Args:
            rows: The tile.
            divisor: [num_rows], float32, above 0.
        """
        logits = scaled_logits(rows, divisor)
        scores, ids = [self._scores], [self._ids]
        # Not topk(), which takes any of equal ones.
        for _ in range(min(self._ids.shape[1], logits.shape[1])):
            index = logits.argmax(dim=-1, keepdim=True)
            scores.append(logits.gather(-1, index))
            ids.append(index + rows.first_id)
            logits.scatter_(-1, index, IMPOSSIBLE)
        self._keep(torch.cat(scores, dim=-1), torch.cat(ids, dim=-1))

    def _keep(self, scores: Tensor, ids: Tensor) -> None:
        """Keep the best scores; equal ones come in ascending order of ids."""
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        num_likeliest = self._ids.shape[1]
        self._scores = scores[:, :num_likeliest]
        self._ids = ids.gather(-1, order[:, :num_likeliest])

    def of_all_ranks(self, head: OutputHead) -> Tensor:
        """[num_rows, num_likeliest], int64: the likeliest first, the lower id of equals.

        A row with fewer possible ids repeats the last of them.

        Args:
            head: Combines the ranks.
        """
        if head.num_shards > 1:
            parts = (head.gather(self._scores), head.gather(self._ids))
            scores, ids = (part.transpose(0, 1).flatten(1) for part in parts)
            self._keep(scores, ids)
        choices = [self._ids[:, 0]]
        for i in range(1, self._ids.shape[1]):
            is_possible = self._scores[:, i] > IMPOSSIBLE
            choices.append(torch.where(is_possible, self._ids[:, i], choices[-1]))
        return torch.stack(choices, dim=-1)


class NamedLogits:
    """Logits of a few tokens that a rule names, from the tiles so far."""

    def __init__(self, num_rows: int, token_ids: tuple[int, ...], device: torch.device) -> None:
        self._token_ids = token_ids
        self._scores = torch.full((num_rows, len(token_ids)), IMPOSSIBLE, device=device)

    def update(self, rows: RowLogits, divisor: Tensor) -> None:
        """Take one tile; arguments as in :meth:`RunningChoices.update`."""
        for i, token_id in enumerate(self._token_ids):
            place = token_id - rows.first_id
            if 0 <= place < rows.projected.shape[1]:
                # Rows begin at a multiple of 4.
                first = place // 4 * 4
                some = rows.projected[:, first : first + 4].contiguous()
                near = rows._replace(projected=some, first_id=rows.first_id + first)
                self._scores[:, i] = scaled_logits(near, divisor)[:, place - first]

    def probabilities(self, head: OutputHead, running: RunningStatistics) -> Tensor:
        """[num_rows, num_named], float32; 0 for a token that is impossible, or none of the
        vocabulary's.

        Args:
            head: Combines the ranks.
            running: Statistics of all tiles and ranks.
        """
        scores = self._scores
        if head.num_shards > 1:
            scores = head.gather(scores).amax(dim=0)
        return drawn_share(scores, running.maximum[:, None], running.total[:, None])
