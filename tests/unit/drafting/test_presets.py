"""Presets of published drafts; tests/integration/test_published_drafts.py holds them to files."""

import pytest

from vllm_diffusion.drafting.presets import DEFAULT_BLOCK, Preset, preset_of, presets

KEPT = [preset for preset in presets() if preset.kept]


@pytest.mark.parametrize("preset", KEPT, ids=lambda preset: preset.draft)
def test_kept_tokens_have_a_source(preset: Preset) -> None:
    """Figures of a publisher name their source, and a verification can keep as many tokens."""
    assert any("kept" in source for source in preset.sources)
    assert all(1 < tokens <= (preset.block or DEFAULT_BLOCK) for tokens in preset.kept.values())
    assert preset.least_kept == sorted(preset.kept.values())[0]


def test_no_draft_is_listed_twice() -> None:
    """A draft is found by the last part of its name, which therefore only one preset has."""
    names = [preset.draft.rpartition("/")[2].lower() for preset in presets()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("draft", "target"),
    [
        ("z-lab/Qwen3.8-27B-DFlash2", "Qwen/Qwen3.8-27B"),
        ("incoai/Qwen3.8-27B-DFlash2", "Qwen/Qwen3.8-27B"),
        ("/models/qwen3.8-27b-dflash2/", "Qwen/Qwen3.8-27B"),
        ("z-lab/Qwen3.8-27B-DFlash2-GGUF", None),
        ("Qwen/Qwen3.8-27B", None),
    ],
)
def test_preset_of_a_draft(draft: str, target: str | None) -> None:
    """A draft has its preset under another owner and in a folder; other names have none."""
    preset = preset_of(draft)
    assert (preset and preset.target) == target
