"""Dream's tokenizer is made from its published files without its repository's code."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.families.published import files_of

pytestmark = pytest.mark.engine

DREAM = "Dream-org/Dream-v0-Instruct-7B"
TEXTS = [
    "What is 7+8? It's 15, I'LL say.",
    "  two  spaces, a\ttab\r\nand lines\n\n\n  end ",
    "e\u0301 is é; Übergröße, ñandú",
    "русский 漢字かな 한국어 हिन्दी عربي",
    "😀👩‍👩‍👧 \u00a0\u3000\x00",
    "<|im_start|>user\nhi<|im_end|>\n<|mask|><|mask|>x<|endoftext|>",
    '<tool_call>\n{"name": "f"}\n</tool_call>',
    "",
]


# The letter that stands for each byte in a vocabulary of bytes.
LETTERS = bytes_to_unicode()


def merges() -> list[tuple[str, str]]:
    """Return as many merges as Dream has: of all pairs of bytes, and of these with a third."""
    each = [LETTERS[byte] for byte in sorted(LETTERS, key=lambda byte: (byte * 97) % 256)]
    pairs = [(a, b) for a in each for b in each]
    triples = [(a + b, c) for a, b in pairs for c in each[:2]]
    return [*pairs, *triples][: 151643 - 256]


def byte_level_bpe(folder: Path, added: dict[str, int]) -> Tokenizer:
    """Return a tokenizer of vocabulary and merges, with the words of Qwen2's, which are Dream's."""
    words = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    made = Tokenizer(BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    made.normalizer = NFC()
    made.pre_tokenizer = Sequence(
        [Split(words, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    by_id = sorted(added, key=lambda token: added[token])
    made.add_tokens([AddedToken(token, normalized=False) for token in by_id])
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of Dream's published files, with a vocabulary of its size, whose code must not
    run.
    """
    made = files_of(DREAM).write(tmp_path_factory.mktemp("dream"))
    tokens = [*LETTERS.values(), *(a + b for a, b in merges())]
    (made / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges())]
    (made / "merges.txt").write_text("\n".join(lines) + "\n")
    (made / "tokenization_dream.py").write_text("raise ImportError('this must not run')\n")
    return made


@pytest.mark.parametrize("trust", [False, True], ids=["", "--trust-remote-code"])
def test_ids_of_published_files(folder: Path, trust: bool) -> None:
    """The tokenizer gives the ids that its vocabulary and merges define, and the text again,
    whether code may be trusted or not.
    """
    from vllm.tokenizers import get_tokenizer

    from vllm_diffusion.plugin import register

    register()
    tokenizer: Any = get_tokenizer(str(folder), trust_remote_code=trust)
    added = files_of(DREAM).files["added_tokens.json"]
    expected = byte_level_bpe(folder, added)
    for text in TEXTS:
        found = tokenizer.encode(text)
        assert found == expected.encode(text).ids, text
        assert tokenizer.decode(found) == unicodedata.normalize("NFC", text)
    special = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")
    names = ("<|beginoftext|>", "<|endoftext|>", "<|endoftext|>", "<|mask|>")
    assert [getattr(tokenizer, name) for name in special] == [added[name] for name in names]
    assert len(tokenizer) == 151667
