"""The texts of a frame's tokens are those that the tokenizer's file has."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from vllm_diffusion.canvas.messages import ReportedFrame
from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.live.frame import CanvasFrame, frame_of

pytestmark = pytest.mark.engine


def frame(token_ids: list[int], fields: tuple[str, ...], tokenizer: object) -> CanvasFrame:
    tokens = np.array(token_ids, np.int32).tobytes()
    reported = ReportedFrame(0, 1, 4, False, False, 0, False, False, tokens)
    state = SimpleNamespace(
        request_index=0,
        detokenizer=IncrementalDetokenizer(),
        logprobs_processor=SimpleNamespace(tokenizer=tokenizer),
    )
    return frame_of(reported, fields, state, 0)


def test_tokens() -> None:
    """One text a position, special tokens spelled; none unless they are asked for, or cannot be."""
    folder = shipped_checkpoint()
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = list(range(file.get_vocab_size()))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = frame(ids, ("tokens",), tokenizer).tokens
    assert texts is not None
    assert list(texts) == [file.decode([i], skip_special_tokens=False) for i in ids]
    assert {"<eos>", "<mask>", "<|turn>", "7", " "} <= set(texts)
    assert frame(ids, ("token_ids", "kept"), tokenizer).tokens is None
    assert frame(ids, ("tokens",), None).tokens is None
