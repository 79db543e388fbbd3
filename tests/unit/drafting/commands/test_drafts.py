"""``vllm-diffusion drafts``; test_docs.py checks that vLLM accepts the commands that it prints."""

import pytest

from vllm_diffusion.cli.main import main


def test_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints what is known of one draft, and the command to serve it, for a repository
    or the end of its name.
    """
    assert main(["drafts", "Qwen/Qwen3.5-27B"]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0] == "target  Qwen/Qwen3.5-27B"
    assert lines[1] == "draft   z-lab/Qwen3.5-27B-DFlash"
    assert lines[2] == "block   16 (num_speculative_tokens 15)"
    assert lines[3].startswith("causal  5 layers of 6")
    assert lines[-1].startswith("vllm serve Qwen/Qwen3.5-27B --speculative-config ")
    assert main(["drafts", "qwen3.5-27b"]) == 0
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("target", "kept"),
    [
        (
            "meta-models/Muse-Glimmer-30B",
            "GSM8K 6.57, MATH-500 6.56, HumanEval 5.66, MBPP 5.30, MT-Bench 4.42 (the model's own sampling)",
        ),
        ("Qwen/Qwen3.5-27B", "not known here"),
    ],
)
def test_kept_tokens(target: str, kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints what the publisher's verifications kept, if that is known."""
    assert main(["drafts", target]) == 0
    assert f"kept    tokens a verification: {kept}" in capsys.readouterr().out.splitlines()
