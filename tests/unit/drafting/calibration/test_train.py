"""Training of drafts: samples of a recording, what a draft learns from, and what a replay
accepts.
"""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM

from tests.support.models.drafts import features, target_model
from vllm_diffusion.checkpoints import shipped_checkpoint, shipped_draft
from vllm_diffusion.drafting.accepted import Verifications
from vllm_diffusion.drafting.calibration.calibrate import replay
from vllm_diffusion.drafting.calibration.extract import _choose
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

VOCAB, MASK, BLOCK, LAYERS = 24, 23, 5, [0, 2]


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    return target_model("qwen3", vocab_size=VOCAB, hidden_size=32)


@pytest.fixture(scope="module")
def ends(target: Any) -> tuple[Any, Any]:
    """The target's embedding and output head."""
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
    """Return parts of a melody of a few notes, in which each note determines the next one."""
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


def test_training_sees_what_drafting_sees(target, ends) -> None:
    """The logits of a block in a batch of many equal those of one pass of the draft at its
    anchor.
    """
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
    """Training takes a draft from hardly any right proposal to more than three per block, leaves
    the target's weights as they are, and returns the history that it reports.
    """
    draft = make_draft(target)
    before = {name: t.clone() for name, t in target.state_dict().items()}
    held_out = samples(target, 24, seed=100)
    _, right = measure(draft.eval(), *ends, held_out, anchors=6)
    assert right.sum() < 1
    settings = TrainSettings(steps=70, batch_size=8, anchors=6, learning_rate=1e-2, report_every=30)
    told = []
    history = train(
        draft, *ends, samples(target, 560, seed=0), settings, held_out=held_out, report=told.append
    )
    assert told == history
    assert [each.step for each in history] == [30, 60, 70]
    assert history[-1].accepted > 3
    assert history[-1].loss < history[0].loss / 3
    falling = list(history[-1].acceptance_by_position)
    assert falling == sorted(falling, reverse=True)
    assert not draft.training
    assert all(torch.equal(t, before[name]) for name, t in target.state_dict().items())


def test_bad_samples(target, ends) -> None:
    """Samples that are fewer than a batch, or not finite, end the training with one sentence."""
    few = samples(target, 3, seed=0)
    with pytest.raises(ValueError, match="fewer samples than one batch of 4"):
        train(make_draft(target), *ends, few, TrainSettings(steps=2, batch_size=4))
    few[0].hidden_states[3] = float("nan")
    with pytest.raises(ValueError, match="not a number after 1 steps"):
        train(make_draft(target), *ends, few, TrainSettings(steps=2, batch_size=3))


def test_read_sample(tmp_path: Path) -> None:
    """The reader takes vLLM's files, each of them once before any is repeated, and refuses other
    files by name.
    """
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
    with pytest.raises(ValueError, match=r"0\.safetensors is not a file of safetensors"):
        read_sample(files[0], 2, 8)
    with pytest.raises(ValueError, match="no .safetensors file"):
        sample_files(tmp_path / "nowhere")


def exchange(prompt: list[int], output: list[int], time: float = 0.0) -> Exchange:
    return Exchange(array("i", prompt), array("i", output), time)


def test_newest_first() -> None:
    """The newest exchanges are chosen where there is no room for all, an exchange that is repeated
    counts once, and long ones are cut at the end.
    """
    old, again, long = exchange([1], [2, 3]), exchange([1], [2, 3]), exchange([4], [5, 6, 7, 8])
    chosen, num_cut, left_out = _choose(
        [exchange([9], [9, 9]), old, again, long], longest=4, max_tokens=7
    )
    assert [list(each.token_ids) for each in chosen] == [[4, 5, 6, 7], [1, 2, 3]]
    assert (num_cut, list(left_out.values())) == (1, [1, 0, 1])


PROMPTS = ([2, 9, 33, 80, 81, 12], [2, 50, 60, 70])


def sample_of(target: Any, draft: ReferenceDraft, tokens: list[int], start: int) -> Sample:
    rows = features(target, tokens, draft.target_layer_ids)
    return Sample(torch.tensor(tokens), rows.unflatten(1, (len(draft.target_layer_ids), -1)), start)


def test_replay() -> None:
    """A replay of the shipped pair gives the same verifications as speculative decoding, except
    that the last one of an answer stops at its end.
    """
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
