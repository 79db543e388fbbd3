"""The files of ``examples/small-gpus`` are options of ``vllm serve``; what they leave room for is rehearsed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness.serve_options import serve_parser

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples/small-gpus").glob("*.yaml"))


@pytest.mark.engine
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_are_understood(file):
    """vLLM's own parser takes them, for a checkpoint and with parsers that the documentation serves."""
    parsed = serve_parser().parse_args(["--config", str(file)])
    assert f"vllm serve {parsed.model} " in (ROOT / "docs/use/serving.md").read_text("utf-8")
    assert parsed.reasoning_parser == parsed.tool_call_parser == "gemma4"
    assert parsed.enable_auto_tool_choice
    assert parsed.limit_mm_per_prompt == {"image": 0, "video": 0}
    # Else vLLM's own number for the GPU counts, which differs between ways to start.
    assert parsed.max_num_batched_tokens == 2048
    assert str(file.relative_to(ROOT)) in file.read_text("utf-8")
