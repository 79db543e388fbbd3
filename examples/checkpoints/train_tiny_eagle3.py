"""Train an EAGLE-3 draft for the shipped tiny target, in some minutes on a CPU.

    python examples/checkpoints/train_tiny_eagle3.py --out eagle3 vllm serve "$(vllm-diffusion
    checkpoint --family qwen3)" --served-model-name tiny --speculative-config \
        '{"method": "eagle3", "model": "eagle3", "num_speculative_tokens": 3}'

EAGLE-3 (arXiv:2503.01840) says one token after another: a layer reads a token's embedding beside
what is known of the position before it, the target's hidden states where the target has been, and
its own output behind that. So it is trained to go on from its own output, several tokens deep. The
checkpoint is one that stock vLLM loads; it begins with random weights and the target's head, and
learns from the target's own greedy answers, as the tiny DFlash draft does.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_model import build_tokenizer, moved_in_when_complete
from tiny_qwen3 import TARGET_LAYER_IDS, load_target
from torch import Tensor, nn
from train_tiny_pair import answers
from transformers import LlamaConfig, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from untrained_eagle3 import untrained_eagle3

from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.drafting.calibration.samples import Sample

# Tokens of a draft. What is behind a wrong one is never looked at, so that later ones weigh less.
DEPTH = 3
WEIGHTS = (1.0, 0.8, 0.6)
BATCH_SIZE = 32
NUM_HELD_OUT = 64


class Attention(nn.Module):
    """Of embeddings beside hidden states, which are twice as wide as what comes out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = (
            n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(2 * config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Layer(nn.Module):
    """The only one."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = LlamaMLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            self.add_module(name, LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps))


class Eagle3(nn.Module):
    """The draft, with the tensor names of its checkpoint; the embedding is the target's."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.fc = nn.Linear(len(TARGET_LAYER_IDS) * width, width, bias=False)
        self.midlayer = Layer(config)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(self, embeddings: Tensor, states: Tensor) -> list[Tensor]:
        """Logits of each token of a draft, whose tokens before it are those of the text.

        Args:
            embeddings: Of the text, [B, T + DEPTH, hidden].
            states: The target's at its first T positions, [B, T, layers * hidden].

        Returns:
            For each depth d [B, T, vocab_size]: of the token at t + d + 2, drafted when the target
            had read those up to t and said the next one.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        T = states.shape[1]
        hidden, keys, values, found = self.fc(states), [], [], []
        # What the target has read is seen as it is; of a draft each row sees its own tokens.
        causal, own = torch.ones(T, T, dtype=torch.bool).tril(), torch.eye(T, dtype=torch.bool)
        for depth in range(DEPTH):
            rows = torch.cat(
                [
                    layer.input_layernorm(embeddings[:, depth + 1 : depth + 1 + T]),
                    layer.hidden_norm(hidden),
                ],
                dim=-1,
            )
            query, key = (
                attention.heads(each(rows)) for each in (attention.q_proj, attention.k_proj)
            )
            rotation = self.rotary_emb(rows, torch.arange(depth, depth + T)[None])
            query, key = apply_rotary_pos_emb(query, key, *rotation)
            keys.append(key)
            values.append(attention.heads(attention.v_proj(rows)))
            out = F.scaled_dot_product_attention(
                query,
                torch.cat(keys, 2),
                torch.cat(values, 2),
                attn_mask=torch.cat([causal, *[own] * depth], 1),
                enable_gqa=True,
            )
            hidden = hidden + attention.o_proj(out.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            found.append(self.lm_head(self.norm(hidden)))
        return found


def batch_of(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B, T] and states [B, T, layers * hidden], and which tokens are of answers, [B, T]."""
    ids = nn.utils.rnn.pad_sequence([each.token_ids for each in samples], batch_first=True)
    states = nn.utils.rnn.pad_sequence(
        [each.hidden_states.flatten(1) for each in samples], batch_first=True
    )
    said = torch.zeros_like(ids, dtype=torch.bool)
    for row, each in zip(said, samples, strict=True):
        row[each.answer_start : len(each.token_ids)] = True
    return ids, states, said


def drafted(
    draft: Eagle3, target: Qwen3ForCausalLM, samples: Sequence[Sample]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each depth logits [B, T, vocab_size], the target's tokens, and where it has said one, [B,
    T].
    """
    ids, states, said = batch_of(samples)
    T = ids.shape[1] - DEPTH - 1
    embeddings = target.get_input_embeddings()(ids)
    for depth, logits in enumerate(draft(embeddings[:, :-1], states[:, :T])):
        place = slice(depth + 2, depth + 2 + T)
        yield logits, ids[:, place], said[:, place]


@torch.no_grad()
def kept(draft: Eagle3, target: Qwen3ForCausalLM, samples: Sequence[Sample]) -> list[float]:
    """Share of drafts that the target would keep as far as each depth."""
    shares, whole = [], torch.ones(())
    for logits, tokens, said in drafted(draft, target, samples):
        # A draft that reaches behind what was recorded is counted as wrong there.
        whole = whole * (said & (logits.argmax(-1) == tokens))
        if not shares:
            num_drafts = said.sum()
        shares.append(float(whole.sum() / num_drafts))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder that is made")
    parser.add_argument("--target", type=Path, default=shipped_checkpoint("qwen3"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer, target = build_tokenizer(), load_target(args.target)
    target.requires_grad_(False)
    with moved_in_when_complete(args.out) as folder:
        untrained_eagle3(args.target, folder, DEPTH)
        torch.manual_seed(args.seed)
        draft = Eagle3(LlamaConfig.from_pretrained(folder))
        for weight in draft.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        draft.lm_head.load_state_dict({"weight": target.get_output_embeddings().weight.float()})
        held_out = list(itertools.islice(answers(target, tokenizer, seed=10**6), NUM_HELD_OUT))
        optimiser = torch.optim.AdamW(draft.parameters(), lr=args.lr, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, args.lr, args.steps)
        stream = answers(target, tokenizer, args.seed)
        for step in range(args.steps + 1):
            if step % 50 == 0 or step == args.steps:
                shares = kept(draft, target, held_out)
                print(
                    f"step {step}: {sum(shares):.2f} of {DEPTH} kept: "
                    + " ".join(f"{share:.2f}" for share in shares),
                    flush=True,
                )
            if step < args.steps:
                samples = list(itertools.islice(stream, BATCH_SIZE))
                losses = [
                    weight * F.cross_entropy(logits[said], tokens[said])
                    for weight, (logits, tokens, said) in zip(
                        WEIGHTS, drafted(draft, target, samples), strict=True
                    )
                ]
                optimiser.zero_grad()
                torch.stack(losses).sum().backward()
                nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
                optimiser.step()
                schedule.step()
        tensors = {
            name: each.to(torch.bfloat16).contiguous() for name, each in draft.state_dict().items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
