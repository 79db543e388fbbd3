"""The reference draft against transformers' Qwen3, and its speculative decoding against
``generate``.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3Model

from tests.support.models import drafts
from tests.support.models.drafts import HIDDEN, MASK, VOCAB, greedy_tokens
from vllm_diffusion.drafting.reference import (
    ReferenceDraft,
    draft_config,
    load_draft,
    save_draft,
    spec_generate,
)
from vllm_diffusion.drafting.reference_draft import build_target_layer_ids, reach_of_layer
from vllm_diffusion.drafting.reveal_block import SCHEDULES

BLOCK = 6


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def target(request):
    return drafts.target_model(request.param, num_hidden_layers=5)


def make_draft(target, **changes) -> ReferenceDraft:
    torch.manual_seed(2)
    sizes = {"num_layers": 2, "block_size": BLOCK, "mask_token_id": MASK}
    return ReferenceDraft(draft_config(target.config, **sizes | changes)).eval()


def prompt_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB - 1, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("known", [0, 9])
def test_causal_draft_is_qwen3(known: int, window: int | None) -> None:
    """One causal layer whose features are the embeddings reads a context as Qwen3 reads a
    prefix.
    """
    draft = drafts.random_draft(
        4,
        num_hidden_layers=1,
        layer_types=["full_attention" if window is None else "sliding_attention"],
        sliding_window=window,
        use_sliding_window=window is not None,
        is_causal=True,
        block_size=BLOCK,
        dflash_config={"mask_token_id": MASK, "target_layer_ids": [1]},
    )
    oracle = Qwen3Model(draft.config)
    with torch.no_grad():
        draft.fc.weight.copy_(torch.eye(HIDDEN))
        draft.hidden_norm.weight.copy_(draft.layers[0].input_layernorm.weight)
    missing, unexpected = oracle.load_state_dict(draft.state_dict(), strict=False)
    assert missing == ["embed_tokens.weight"]
    assert sorted(unexpected) == ["fc.weight", "hidden_norm.weight"]
    rows = torch.randn(2, known + BLOCK, HIDDEN)
    at = torch.arange(known + BLOCK).expand(2, -1)
    # Two positions of the context are not before the anchor, and must not be seen.
    seen = torch.cat([rows[:, :known], torch.randn(2, 2, HIDDEN)], 1)
    context = draft.context(seen, at[:, : known + 2])
    anchors = torch.full((2, BLOCK), known)
    found = draft(rows[:, known:], at[:, known:], anchors, context, at[:, : known + 2])
    expected = oracle(inputs_embeds=rows, use_cache=False).last_hidden_state[:, known:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_window_in_both_directions(target) -> None:
    """A row of a bidirectional draft sees as far ahead as back, its own position counted."""
    draft = make_draft(target, window=3)
    assert reach_of_layer(draft.config, 0) == (3, False)
    rows = torch.randn(1, BLOCK, HIDDEN)
    at = 20 + torch.arange(BLOCK)[None]
    anchors = torch.full_like(at, 20)
    known = torch.arange(20)[None]
    raw = torch.randn(1, 20, len(draft.target_layer_ids) * HIDDEN)

    def first_layer(raw, rows):
        context = draft.context(raw, known)[:1]
        layers, draft.layers = draft.layers, draft.layers[:1]
        out = draft(rows, at, anchors, context, known)
        draft.layers = layers
        return out[0]

    plain = first_layer(raw, rows)
    for position in range(20 + BLOCK):
        changed_raw, changed_rows = raw.clone(), rows.clone()
        if position < 20:
            changed_raw[0, position] += 1
        else:
            changed_rows[0, position - 20] = -changed_rows[0, position - 20]
        differs = (first_layer(changed_raw, changed_rows) != plain).any(-1)
        assert differs.tolist() == [abs(20 + i - position) < 3 for i in range(BLOCK)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (None, False)),
        ({"layer_types": ["sliding_attention"], "sliding_window": 7}, (7, True)),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 7, "is_causal": False},
            (7, False),
        ),
        ({"use_swa": True, "swa_window_size": 9}, (9, False)),
        ({"causal": True}, (None, True)),
        ({"causal": True, "is_causal": False}, (None, False)),
    ],
)
def test_reach_of_layer_is_vllms(changes: dict, expected: tuple) -> None:
    """The windows of a draft's layers, which published files spell in several ways, are read as
    vLLM reads them.
    """
    pytest.importorskip("vllm")
    from vllm.model_executor.models.qwen3_dflash import _resolve_layer_attention

    options = {k: changes[k] for k in ("use_swa", "swa_window_size", "causal") if k in changes}
    others = {k: v for k, v in changes.items() if k not in options}
    config = Qwen3Config(num_hidden_layers=1, dflash_config=options)
    for name, value in {"layer_types": ["full_attention"], **others}.items():
        setattr(config, name, value)
    assert reach_of_layer(config, 0) == _resolve_layer_attention(config, 0) == expected


def test_checkpoint(target, tmp_path: Path) -> None:
    """A saved draft has z-lab's names and keys, and loading it gives the same tensors."""
    draft = make_draft(target)
    save_draft(draft, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {"input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj"}
    layer |= {"mlp.down_proj", *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj"))}
    layer |= {f"self_attn.{name}" for name in ("o_proj", "q_norm", "k_norm")}
    names = {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    assert set(tensors) == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["block_size"] == BLOCK
    assert config["num_target_layers"] == 5
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [1, 2]}
    for name, tensor in load_draft(tmp_path).state_dict().items():
        assert torch.equal(tensor, draft.state_dict()[name])
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc\.weight"):
        load_draft(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mask_token_id": VOCAB}, "mask_token_id"),
        ({"block_size": 1}, "block_size"),
        # The last layer's output is not the same in transformers and vLLM, and none is read twice.
        *(({"target_layer_ids": ids}, "target_layer_ids") for ids in ([], [4], [-1], [1, 1])),
        ({"num_layers": 9}, "num_draft_layers"),
    ],
)
def test_bad_config(target, changes: dict, said: str) -> None:
    """A wrong field of a draft's configuration is refused by name."""
    with pytest.raises(ValueError, match=said):
        make_draft(target, **changes)


@pytest.mark.parametrize(
    ("steps", "order"), [(1, "confidence"), (3, "confidence"), (3, "position")]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_spec_generate_greedy(target, steps: int, schedule: str, order: str) -> None:
    """Greedy tokens are those of transformers' own loop, whatever the draft proposes."""
    draft = make_draft(target)
    for length in (1, 20):
        prompt = prompt_of(length, length)
        found = spec_generate(
            target, draft, prompt, 20, steps=steps, schedule=schedule, order=order
        )
        assert found.tokens == greedy_tokens(target, prompt[0].tolist(), 20)
        said = sum(found.accepted) + len(found.accepted)
        assert said >= 19
        assert found.tokens_per_verification == pytest.approx(said / len(found.accepted))


def test_spec_generate_stops(target) -> None:
    """The first stop token ends the answer, also in the middle of accepted tokens."""
    prompt = prompt_of(12)
    draft = make_draft(target)
    whole = spec_generate(target, draft, prompt, 40).tokens
    for stop in set(whole[::4]):
        found = spec_generate(target, draft, prompt, 40, stop_token_ids=[stop])
        assert found.tokens == whole[: whole.index(stop) + 1]


@pytest.mark.parametrize(
    ("num_target_layers", "num_draft_layers", "expected"),
    [
        (64, 4, [1, 21, 41, 61]),
        (36, 5, [1, 9, 17, 25, 33]),
        (36, 1, [18]),
        (4, 1, [2]),
        (28, 2, [1, 25]),
        (6, 3, [1, 2, 3]),
    ],
)
def test_build_target_layer_ids(num_target_layers, num_draft_layers, expected) -> None:
    """The layers that a draft reads run evenly from 1 to the third from the end, as in published
    drafts; a single one is the middle layer.
    """
    assert build_target_layer_ids(num_target_layers, num_draft_layers) == expected
