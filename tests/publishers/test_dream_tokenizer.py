"""Dream's tokenizer of this package, held to the publisher's class and files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.publishers import checkout, modules_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
LETTERS = [
    "abc XYZ 019 \n\t\r'\"",
    "äöüßé e\u0301 ñ",
    "漢字かなカナ한국어",
    "русский عربي עברית हिन्दी",
    "😀👩‍👧\u200d\u00a0\u3000\x00",
    ["<|im_start|>", "<|im_end|>", "<|mask|>", "<tool_call>", "<|endoftext|>", "<|beginoftext|>"],
]


def test_ids_and_chats() -> None:
    """Pages, programs and texts of many scripts have the ids of the publisher's class, and chats
    those of its template, with the published vocabulary.
    """
    from vllm.tokenizers import get_tokenizer

    from vllm_diffusion.plugin import register

    folder = checkout("dllm-research") / "models/Dream-7B-Instruct"
    register()
    ours = get_tokenizer(str(folder))
    module = modules_of(folder, "dream_7b_instruct")("tokenization_dream")
    theirs = module.DreamTokenizer.from_pretrained(folder)
    assert "tokenization_dream" not in type(ours).__mro__[1].__module__
    draw = random.Random(1)
    texts = [path.read_text() for path in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/*.py")]]
    texts += [
        "".join(draw.choice(draw.choice(LETTERS)) for _ in range(draw.randint(0, 60)))
        for _ in range(2000)
    ]
    for text in texts:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text)), text
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "What is 7+8?"}]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    for tools in (None, [tool]):
        options = {"tools": tools, "add_generation_prompt": True, "return_dict": False}
        chat = ours.apply_chat_template(messages, **options)
        assert chat == theirs.apply_chat_template(messages, **options)
