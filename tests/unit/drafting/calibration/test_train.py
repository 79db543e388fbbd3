"""What is replayed of a recording, drafts that learn from what they will see, and what they would have kept."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM

from tests.support.drafts import features, target_model
from vllm_diffusion.cli.checkpoint import shipped_checkpoint, shipped_draft
from vllm_diffusion.drafting.accepted import Verifications
from vllm_diffusion.drafting.calibration.extract import _batches, _choose
from vllm_diffusion.drafting.calibration.picture import draw_training
from vllm_diffusion.drafting.calibration.replay import replay
from vllm_diffusion.drafting.calibration.samples import (
    Sample,
    read_sample,
    sample_files,
    shuffled_samples,
)
from vllm_diffusion.drafting.calibration.train import (
    Batch,
    TrainSettings,
    block_logits,
    draw_blocks,
    measure,
    train,
)
from vllm_diffusion.drafting.recording import Exchange
from vllm_diffusion.drafting.reference import (
    Context,
    ReferenceDraft,
    draft_config,
    load_draft,
    propose,
    spec_generate,
)

FIELDS = ("ids", "positions", "anchors", "labels")
VOCAB, MASK, BLOCK, LAYERS = 24, 23, 5, [0, 2]


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    return target_model("qwen3", vocab_size=VOCAB, hidden_size=32)


@pytest.fixture(scope="module")
def ends(target: Any) -> tuple[Any, Any]:
    """Embedding and output head."""
    return target.get_input_embeddings(), target.get_output_embeddings()


def make_draft(target, seed: int = 1) -> ReferenceDraft:
    torch.manual_seed(seed)
    return ReferenceDraft(
        draft_config(
            target.config,
            num_layers=1,
            block_size=BLOCK,
            mask_token_id=MASK,
            target_layer_ids=LAYERS,
        )
    )


def samples(target, num: int, seed: int) -> list[Sample]:
    """A melody of a few notes, from anywhere in it: what follows is known from the last one."""
    generator = torch.Generator().manual_seed(seed)
    # Where each begins, and how long it is.
    firsts = torch.randint(6, (num,), generator=generator)
    lengths = torch.randint(10, 20, (num,), generator=generator)
    notes = torch.tensor([3, 17, 9, 12, 1, 20])
    longest = notes[(torch.arange(6)[:, None] + torch.arange(20)) % 6]
    # [first, position, layer, hidden]
    states = torch.stack([features(target, ids.tolist(), LAYERS) for ids in longest])
    states = states.unflatten(-1, (len(LAYERS), -1))
    return [
        Sample(longest[first, :length], states[first, :length].clone(), answer_start=2)
        for first, length in zip(firsts, lengths, strict=True)
    ]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_draw_blocks(data) -> None:
    """Blocks are the text's, at different anchors of the answer, with a mask in each at least."""
    lengths = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    starts = [data.draw(st.integers(0, length)) for length in lengths]
    num_blocks, share = data.draw(st.integers(1, 20)), data.draw(st.sampled_from((0.0, 0.5, 1.0)))
    size = data.draw(st.integers(2, 6))
    text = torch.arange(max(lengths)) + 100 * torch.arange(1, len(lengths) + 1)[:, None]
    batch = SimpleNamespace(
        token_ids=text, starts=torch.tensor(starts), lengths=torch.tensor(lengths)
    )
    draft = SimpleNamespace(block_size=size, mask_token_id=-7)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    blocks = draw_blocks(batch, draft, num_blocks, share, generator)
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        rows = [getattr(blocks, name)[b].view(-1, size).tolist() for name in FIELDS]
        anchors = [block[0] for block in rows[2]]
        assert len(set(anchors)) == len(anchors)
        real = [a for a in anchors if a >= 0]
        assert len(real) == min(num_blocks, max(lengths), max(0, length - 1 - start))
        for ids, positions, anchor, labels in zip(*rows, strict=True):
            assert set(anchor) == {anchor[0]}
            assert positions == list(range(anchor[0], anchor[0] + size))
            learnt = [i for i, label in enumerate(labels) if label != -100]
            if anchor[0] < 0:
                assert not learnt
                continue
            assert start <= anchor[0] < length - 1
            assert ids[0] == text[b, anchor[0]]
            known = [i for i in range(1, size) if positions[i] < length]
            for i in range(1, size):
                if i in learnt:
                    assert (ids[i], labels[i]) == (-7, text[b, positions[i]])
                else:
                    assert ids[i] == (text[b, positions[i]] if i in known else -7)
            if share == 0:
                assert learnt == known


def test_training_sees_what_drafting_sees(target, ends) -> None:
    """A block's logits in a batch of many are those of one pass of the draft at its anchor."""
    draft = make_draft(target).eval()
    chosen = samples(target, 3, seed=5)
    batch = Batch(chosen, draft.fc.weight)
    blocks = draw_blocks(batch, draft, 4, 0.0, torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = block_logits(draft, *ends, batch, blocks)
    compared = 0
    for b, sample in enumerate(chosen):
        for first in range(0, blocks.ids.shape[1], BLOCK):
            anchor = int(blocks.anchors[b, first])
            context = Context(draft)
            with torch.no_grad():
                context.append(sample.hidden_states[:anchor].flatten(1))
            _, expected = propose(context, target, int(sample.token_ids[anchor]))
            torch.testing.assert_close(
                logits[b, first + 1 : first + BLOCK], expected, rtol=1e-4, atol=1e-5
            )
            compared += 1
    assert compared == 12


def test_train(target, ends) -> None:
    """From hardly any proposal to nearly all of them; what is frozen stays, and reports add up."""
    draft = make_draft(target)
    before = {name: t.clone() for name, t in target.state_dict().items()}
    held_out = samples(target, 24, seed=100)
    _, right = measure(draft.eval(), *ends, held_out, anchors=6)
    assert right.sum() < 1
    settings = TrainSettings(steps=70, batch_size=8, anchors=6, learning_rate=1e-2, report_every=30)
    told = []
    history = train(
        draft,
        *ends,
        samples(target, 560, seed=0),
        settings,
        held_out=held_out,
        report=told.append,
    )
    assert told == history
    assert [each.step for each in history] == [30, 60, 70]
    assert history[-1].accepted > 3
    assert history[-1].loss < history[0].loss / 3
    falling = list(history[-1].acceptance_by_position)
    assert falling == sorted(falling, reverse=True)
    assert not draft.training
    assert all(torch.equal(t, before[name]) for name, t in target.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 0}, "steps=0"),
        ({"anchors": 0}, "anchors=0"),
        ({"revealed_share": 1.5}, "revealed_share=1.5"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"gamma": 0.0}, "gamma"),
    ],
)
def test_bad_settings(changes: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainSettings(**{"steps": 5} | changes)


def test_bad_samples(target, ends) -> None:
    """Too few, and ones that are not finite, end the training with a sentence."""
    few = samples(target, 3, seed=0)
    with pytest.raises(ValueError, match="fewer samples than one batch of 4"):
        train(make_draft(target), *ends, few, TrainSettings(steps=2, batch_size=4))
    few[0].hidden_states[3] = float("nan")
    with pytest.raises(ValueError, match="not a number after 1 steps"):
        train(make_draft(target), *ends, few, TrainSettings(steps=2, batch_size=3))


def test_read_sample(tmp_path: Path) -> None:
    """vLLM's files are read, all of them before any again; others are refused by name."""
    for i in range(3):
        tensors = {"token_ids": torch.arange(4) + i, "hidden_states": torch.randn(4, 2, 8)}
        if i == 1:
            tensors["answer_start"] = torch.tensor(2)
        save_file(tensors, tmp_path / f"{i}.safetensors")
    files = sample_files(tmp_path)
    found = read_sample(files[1], 2, 8)
    assert found.token_ids.tolist() == [1, 2, 3, 4]
    assert found.answer_start == 2
    stream = shuffled_samples(files, 2, 8, seed=0)
    for _ in range(3):
        assert {int(next(stream).token_ids[0]) for _ in files} == {0, 1, 2}
    with pytest.raises(ValueError, match=r"0\.safetensors has hidden_states of \[4, 2, 8\]"):
        read_sample(files[0], 3, 8)
    save_file({"token_ids": torch.arange(4)}, files[0])
    with pytest.raises(ValueError, match="no tensor 'hidden_states'"):
        read_sample(files[0], 2, 8)
    files[0].write_bytes(b"rubbish")
    with pytest.raises(ValueError, match=r"0\.safetensors is no file of safetensors"):
        read_sample(files[0], 2, 8)
    with pytest.raises(ValueError, match="no .safetensors file"):
        sample_files(tmp_path / "nowhere")


def test_draw_training(target, ends) -> None:
    """Well-formed, with a bar for each position; without held-out samples the loss alone."""
    given = samples(target, 8, seed=0)
    settings = TrainSettings(steps=2, batch_size=4, report_every=1)
    for held_out, num_panels in ((given, 3), ((), 1)):
        history = train(make_draft(target), *ends, given, settings, held_out=held_out)
        root = ElementTree.fromstring(draw_training(history))
        panels = root.findall("{http://www.w3.org/2000/svg}g")
        assert len(panels) == num_panels
        bars = [len(p.findall("{http://www.w3.org/2000/svg}rect")) for p in panels]
        assert bars == [0, BLOCK - 1, BLOCK - 1][:num_panels]


IDS = st.lists(st.integers(0, 9), max_size=12)


def exchange(prompt: list[int], output: list[int], time: float = 0.0) -> Exchange:
    return Exchange(array("i", prompt), array("i", output), time)


@given(
    exchanges=st.lists(st.builds(exchange, IDS, IDS.filter(bool))),
    longest=st.integers(1, 20),
    max_tokens=st.integers(0, 100),
)
def test_choice(exchanges: list[Exchange], longest: int, max_tokens: int) -> None:
    """Each once or left out for one reason; never more tokens than there is room for, none too long."""
    chosen, _, left_out = _choose(exchanges, longest, max_tokens)
    assert len(chosen) + sum(left_out.values()) == len(exchanges)
    assert sum(len(each.token_ids) for each in chosen) <= max_tokens
    assert all(2 <= len(each.token_ids) <= longest and each.output_token_ids for each in chosen)


def test_newest_first() -> None:
    """Where there is no room for all; a repeated one is not a second sample; ends are cut."""
    old, again, long = exchange([1], [2, 3]), exchange([1], [2, 3]), exchange([4], [5, 6, 7, 8])
    chosen, num_cut, left_out = _choose(
        [exchange([9], [9, 9]), old, again, long], longest=4, max_tokens=7
    )
    assert [list(each.token_ids) for each in chosen] == [[4, 5, 6, 7], [1, 2, 3]]
    assert (num_cut, list(left_out.values())) == (1, [1, 0, 1])


@given(st.lists(st.builds(exchange, IDS, IDS.filter(bool)), min_size=1), st.integers(1, 40))
def test_batches(exchanges: list[Exchange], max_tokens: int) -> None:
    """All in order; one at a time where one is larger than a batch."""
    batches = list(_batches(exchanges, max_tokens))
    assert [pair for batch in batches for pair in batch] == list(enumerate(exchanges))
    for batch in batches:
        assert len(batch) == 1 or sum(len(each.token_ids) for _, each in batch) <= max_tokens


PROMPTS = ([2, 9, 33, 80, 81, 12], [2, 50, 60, 70])


def sample_of(target: Any, draft: ReferenceDraft, tokens: list[int], start: int) -> Sample:
    rows = features(target, tokens, draft.target_layer_ids)
    return Sample(torch.tensor(tokens), rows.unflatten(1, (len(draft.target_layer_ids), -1)), start)


def test_replay() -> None:
    """The shipped pair: the same verifications, but for the last one, which may pass the end."""
    target = Qwen3ForCausalLM.from_pretrained(shipped_checkpoint("qwen3"), dtype=torch.float32)
    trained = load_draft(shipped_draft())
    random = ReferenceDraft(
        draft_config(target.config, num_layers=1, block_size=8, mask_token_id=trained.mask_token_id)
    ).eval()
    parts = target.get_input_embeddings(), target.get_output_embeddings()
    found = {}
    for draft in (trained, random):
        samples, expected = [], []
        for prompt in PROMPTS:
            said = spec_generate(target.eval(), draft, torch.tensor([prompt]), 40)
            samples.append(sample_of(target, draft, prompt + said.tokens, len(prompt)))
            # Every verification stands at the sum of those before it.
            *whole, last = said.accepted
            expected += whole
            expected.append(min(last, 39 - sum(kept + 1 for kept in whole)))
        found[draft] = replay(draft, *parts, samples)
        assert found[draft] == Verifications.of(expected, draft.block_size - 1)
    assert found[trained].is_better_than(found[random])
    assert not found[random].is_better_than(found[trained])
