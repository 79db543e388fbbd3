"""Dream's tokenizer is made from its published files without its repository's code."""

from __future__ import annotations

import json
import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import regex

from tests.support.families.published import files_of

pytestmark = pytest.mark.engine

DREAM = "Dream-org/Dream-v0-Instruct-7B"
# Words of a text in Qwen2's tokenizer, which is Dream's.
WORDS = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
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


@lru_cache
def letters() -> dict[int, str]:
    """Return the letter that stands for each byte in a vocabulary of bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {
        byte: chr(256 + i) for i, byte in enumerate(hidden)
    }


def merges() -> list[tuple[str, str]]:
    """Return as many merges as Dream has: of all pairs of bytes, and of these with a third."""
    each = [letters()[byte] for byte in sorted(letters(), key=lambda byte: (byte * 97) % 256)]
    pairs = [(a, b) for a in each for b in each]
    triples = [(a + b, c) for a, b in pairs for c in each[:2]]
    return [*pairs, *triples][: 151643 - 256]


def encoded(text: str, ids: dict[str, int], added: dict[str, int]) -> list[int]:
    """Return the ids of a text by the definition of byte-level BPE."""
    ranks = {pair: rank for rank, pair in enumerate(merges())}
    found: list[int] = []
    pattern = "|".join(regex.escape(token) for token in added)
    for part in regex.split(f"({pattern})", text):
        if part in added:
            found.append(added[part])
            continue
        for word in WORDS.findall(unicodedata.normalize("NFC", part)):
            tokens = [letters()[byte] for byte in word.encode()]
            while len(tokens) > 1:
                pairs = list(zip(tokens, tokens[1:], strict=False))
                best = min(pairs, key=lambda pair: ranks.get(pair, 1 << 30))
                if best not in ranks:
                    break
                i, merged = 0, []
                while i < len(tokens):
                    if tuple(tokens[i : i + 2]) == best:
                        merged.append("".join(best))
                        i += 2
                    else:
                        merged.append(tokens[i])
                        i += 1
                tokens = merged
            found += [ids[token] for token in tokens]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of Dream's published files, with a vocabulary of its size, whose code must not
    run.
    """
    made = files_of(DREAM).write(tmp_path_factory.mktemp("dream"))
    tokens = [*letters().values(), *(a + b for a, b in merges())]
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
    ids = json.loads((folder / "vocab.json").read_text())
    added = files_of(DREAM).files["added_tokens.json"]
    assert len(ids) == min(added.values())
    for text in TEXTS:
        found = tokenizer.encode(text)
        assert found == encoded(text, ids, added), text
        assert tokenizer.decode(found) == unicodedata.normalize("NFC", text)
    special = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")
    names = ("<|beginoftext|>", "<|endoftext|>", "<|endoftext|>", "<|mask|>")
    assert [getattr(tokenizer, name) for name in special] == [added[name] for name in names]
    assert len(tokenizer) == 151667
