"""Speculative decoding of a batch with a small language model as the draft, in two ways.

A reference to read, on ``transformers``' caches. vLLM needs neither way: it gives each request
positions and pages of its own. Rows of a batch accept different numbers of tokens, and either

* *per sequence* (:func:`per_sequence`): each row keeps its own length, caches are cut back to the
  shortest, and every pass reads again what longer rows have that the shortest lacks; or
* *synchronised* (:func:`synchronised`): all rows share one position. Rows that accepted fewer have
  a gap, which a mask hides; the token behind it stands where the row that accepted most has its
  own. A token's place in the cache is its index in the tensor; its rotary position counts unmasked
  tokens.

In the synchronised way the target reads one token more of a block than the draft does, the last
proposal. Where a row keeps it, the draft's cache lacks it: a *cache gap*, which changes no answer
and costs acceptance. There are three remedies (``REMEDIES``).

    python examples/drafting/batched_speculation.py
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

REMEDIES = ("extra pass", "two tokens first", "crop")


@dataclass
class Answers:
    """What a batch was answered, and what it took.

    Attributes:
        tokens: Behind each prompt, up to and with the first stop token.
        accepted: For each block, how many proposals each unfinished row kept.
        draft_logits: For each proposal of the draft: the row, the tokens before it, the logits.
    """

    tokens: list[list[int]]
    accepted: list[list[int]] = field(default_factory=list)
    draft_logits: list[tuple[int, list[int], Tensor]] = field(default_factory=list)

    @property
    def block_efficiency(self) -> float:
        """Tokens a row gets of a block, in the mean: what it kept, and one more."""
        kept = [count for block in self.accepted for count in block]
        return 1 + sum(kept) / len(kept)


def laws(logits: Tensor, temperature: float) -> Tensor:
    """What tokens are drawn from, float64: also what acceptance compares, in target and draft."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return (logits.double() / temperature).softmax(-1)


def draw(law: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token a row of [B, vocab_size]."""
    return torch.multinomial(law, 1, generator=generator)[:, 0]


def accept(
    p: Tensor, q: Tensor, proposals: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """How many proposals each row keeps, and the token behind them.

    Args:
        p: The target's laws, [B, K + 1, vocab_size].
        q: The draft's, [B, K, vocab_size], which the proposals were drawn from.
        proposals: [B, K], int64.
        generator: Of the draws.

    Returns:
        Both [B], int64. Behind a rejected proposal the token is drawn from what ``p`` has above
        ``q``; where all were kept, from ``p`` alone.
    """
    B, K = proposals.shape
    p_token = p[:, :K].gather(2, proposals[..., None])[..., 0]
    q_token = q.gather(2, proposals[..., None])[..., 0]
    # q_token is above 0, since the token was drawn from q: no ratio is 0 / 0.
    log_ratio = p_token.log() - q_token.log()
    log_draw = torch.rand(B, K, dtype=p.dtype, generator=generator).log()
    kept = (log_draw < log_ratio).long().cumprod(1).sum(1)
    row = torch.arange(B)
    # A row of zeros behind the last proposal: nothing was proposed there.
    residual = (p[row, kept] - F.pad(q, (0, 0, 0, 1))[row, kept]).clamp(min=0)
    return kept, draw(residual, generator)


@torch.no_grad()
def per_sequence(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    num_proposals: int = 5,
    temperature: float = 0.0,
    stop_token_ids: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
) -> Answers:
    """Each row has its own length; caches hold what all unfinished rows have in common by index.

    Args:
        target: Whose answers these are.
        draft: A language model of the same vocabulary.
        prompts: Token ids, at least one each.
        max_new_tokens: Longest answer.
        num_proposals: Of a block.
        temperature: 0 takes the likeliest token.
        stop_token_ids: The first of them ends a row.
        generator: Of the draws.
    """
    answers = Answers([[] for _ in prompts])
    rows = [list(prompt) for prompt in prompts]
    models = {"target": target, "draft": draft}
    caches = {name: DynamicCache() for name in models}
    active = list(range(len(rows)))

    def read(name: str, sequences: list[list[int]]) -> list[Tensor]:
        """Logits of what is not in the cache, for each sequence up to its own end."""
        start = caches[name].get_seq_length()
        longest = max(map(len, sequences))
        ids = torch.tensor([s[start:] + [0] * (longest - len(s)) for s in sequences])
        # The cache by its place: its name is another since transformers 5.24.
        logits = models[name](ids, None, None, caches[name], use_cache=True).logits
        # Right of a row's own end stands padding, which causal rows never see. It is read again.
        _cut(caches[name], min(map(len, sequences)))
        return [row[: len(s) - start] for row, s in zip(logits, sequences, strict=True)]

    while active:
        sequences = [rows[i] for i in active]
        K = num_proposals
        drafted = [list(s) for s in sequences]
        # The token behind which the block begins must be read by both models again.
        shortest = min(map(len, sequences)) - 1
        for cache in caches.values():
            _cut(cache, shortest)
        q = []
        for _ in range(K):
            last = torch.stack([logits[-1] for logits in read("draft", drafted)])
            answers.draft_logits += zip(active, map(list, drafted), last, strict=True)
            q.append(laws(last, temperature))
            for s, token in zip(drafted, draw(q[-1], generator).tolist(), strict=True):
                s.append(token)
        p = torch.stack([logits[-K - 1 :] for logits in read("target", drafted)])
        proposals = torch.tensor([s[-K:] for s in drafted])
        kept, following = accept(laws(p, temperature), torch.stack(q, 1), proposals, generator)
        answers.accepted.append(kept.tolist())
        for at, i in enumerate(active):
            new = [*proposals[at, : kept[at]].tolist(), int(following[at])]
            rows[i] += new
            answers.tokens[i] += new
        _keep_unfinished(answers, active, caches.values(), max_new_tokens, stop_token_ids)
    return answers


def _cut(cache: DynamicCache, length: int) -> None:
    if (surplus := cache.get_seq_length() - length) > 0:
        cache.crop(-surplus)


def _keep_unfinished(answers: Answers, active: list[int], caches, max_new_tokens, stops) -> None:
    """End rows at a stop token, also in the middle of what was accepted, or at their length."""
    going = []
    for at, i in enumerate(active):
        tokens = answers.tokens[i]
        ends = [n + 1 for n, token in enumerate(tokens) if token in stops]
        if ends or len(tokens) >= max_new_tokens:
            del tokens[min([max_new_tokens, *ends]) :]
        else:
            going.append(at)
    if 0 < len(going) < len(active):
        for cache in caches:
            cache.batch_select_indices(torch.tensor(going))
    active[:] = [active[at] for at in going]


def positions_of(mask: Tensor) -> Tensor:
    """Rotary positions of a batch with gaps: [1,1,1,0,0,1,1] -> [0,1,2,2,2,3,4]."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def synchronised(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    remedy: str = "two tokens first",
    num_proposals: int = 5,
    temperature: float = 0.0,
    stop_token_ids: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
) -> Answers:
    """All rows end at one index; what a row rejected is masked, and its answer goes on behind the
    gap.

    Gaps stay: a row pays attention over the sum of every block's longest acceptance, which is why
    vLLM does not do this. Rows that are answered stay in the batch and are ignored.

    Args:
        target: As for :func:`per_sequence`, as all that follows.
        draft: Of the same vocabulary.
        prompts: Token ids.
        max_new_tokens: Longest answer.
        remedy: Of :data:`REMEDIES`, against the gap in the draft's cache.
        num_proposals: Of a block.
        temperature: 0 takes the likeliest token.
        stop_token_ids: The first of them ends a row.
        generator: Of the draws.
    """
    answers = Answers([[] for _ in prompts])
    B, K = len(prompts), num_proposals
    end = max(map(len, prompts))
    # Every block gives every row a token at least, and takes K + 1 indices at most.
    size = end + (max_new_tokens + 1) * (K + 1)
    ids = torch.zeros(B, size, dtype=torch.long)
    mask = torch.zeros(B, size, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, end - len(prompt) : end] = torch.tensor(prompt)
        mask[row, end - len(prompt) : end] = True
    models = {"target": target, "draft": draft}
    # transformers 5 no longer takes an index to write at: a cache that is cut back is where it
    # ends.
    caches = {name: DynamicCache() for name in models}

    def read(name: str, stop: int) -> Tensor:
        """Logits of the indices from the end of the model's cache to ``stop``."""
        start = caches[name].get_seq_length()
        return models[name](
            ids[:, start:stop],
            mask[:, :stop],
            # The cache goes by index, gaps and all; rotary positions go by what is not masked.
            positions_of(mask[:, :stop])[:, start:],
            caches[name],
            use_cache=True,
        ).logits

    going = list(range(B))
    while going:
        block = end  # where the first proposal goes
        q = []
        for k in range(K):
            last = read("draft", block + k)[:, -1]
            answers.draft_logits += [
                (i, ids[i, : block + k][mask[i, : block + k]].tolist(), last[i]) for i in going
            ]
            q.append(laws(last, temperature))
            ids[:, block + k] = draw(q[-1], generator)
            mask[:, block + k] = True
        if remedy == "extra pass":
            read("draft", block + K)
        p = laws(read("target", block + K)[:, -K - 1 :], temperature)
        kept, following = accept(p, torch.stack(q, 1), ids[:, block : block + K], generator)
        answers.accepted.append(kept[going].tolist())
        longest = int(kept[going].max())
        for i in going:
            answers.tokens[i] += [*ids[i, block : block + kept[i]].tolist(), int(following[i])]
        end = block + longest + 1
        index = torch.arange(size)
        rejected = (index >= block + kept[:, None]) & (index < block + K)
        mask &= ~rejected
        ids[:, end - 1] = following
        mask[:, end - 1] = True
        # Both models read the token at end - 1 next. The draft has not read the last proposal:
        # where a row kept it, its cache ends one index before the target's.
        _cut(caches["target"], end - 1)
        _cut(caches["draft"], block - 1 if remedy == "crop" else end - 1)
        _keep_unfinished(answers, going, (), max_new_tokens, stop_token_ids)
    return answers


def main() -> None:
    """Three prompts by the shipped tiny target, with its own first two layers as the draft."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_diffusion.checkpoints import shipped_checkpoint

    folder = shipped_checkpoint("qwen3")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder).eval()
    draft = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=2).eval()
    questions = ("What is 7+8?", "Count from 3 to 9.", "Make a bullet list: cat, dog, tree.")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False
        )
        for q in questions
    ]
    stops = tuple(target.generation_config.eos_token_id)
    found = {"per sequence": per_sequence(target, draft, prompts, 64, stop_token_ids=stops)}
    for remedy in REMEDIES:
        found[f"synchronised, {remedy}"] = synchronised(
            target, draft, prompts, 64, remedy=remedy, stop_token_ids=stops
        )
    for name, answers in found.items():
        print(f"{name}: {answers.block_efficiency:.2f} tokens a block")
        print([tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers.tokens])


if __name__ == "__main__":
    main()
