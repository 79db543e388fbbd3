"""Tokenizers of published files, which a server makes without their code, held to that code."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.publishers import checkout, modules_of
from tests.support.families.published import files_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
LETTERS = [
    "abc XYZ 019 \n\t\r'\"",
    "äöüßé e\u0301 ñ",
    "漢字かなカナ한국어",
    "русский عربي עברית हिन्दी",
    "😀👩‍👧\u200d\u00a0\u3000\x00",
    [
        "<|im_start|>",
        "<|im_end|>",
        "<|mask|>",
        "<tool_call>",
        "<|endoftext|>",
        "<|beginoftext|>",
        "<|MASK|>",
    ],
]


def dream(_: Path) -> tuple[Path, Any]:
    """Return the folder of Dream's tokenizer, and the publisher's class."""
    folder = checkout("dllm-research") / "models/Dream-7B-Instruct"
    return folder, modules_of(folder, "dream_7b_instruct")("tokenization_dream").DreamTokenizer


def sdar(folder: Path) -> tuple[Path, Any]:
    """The same of SDAR, whose checkout has all but the vocabulary, which is that of Qwen2.5."""
    own = checkout("SDAR") / "training/model/SDAR-4B-Chat"
    made = files_of("JetLM/SDAR-4B-Chat").write(folder)
    for file in ("merges.txt", "chat_template.jinja", "tokenization_qwen2.py"):
        shutil.copy(own / file, made)
    qwen = checkout("DualDiffusion") / "FastDLLM_inferencing/Fast_dLLM_v2_7B"
    shutil.copy(qwen / "vocab.json", made)
    return made, modules_of(own, "sdar_4b_chat")("tokenization_qwen2").Qwen2Tokenizer


@pytest.mark.parametrize("publisher", [dream, sdar], ids=lambda one: one.__name__)
def test_ids_and_chats(publisher: Any, tmp_path: Path) -> None:
    """Pages, programs and texts of many scripts have the ids of the publisher's class, and chats
    those of its template, with the published vocabulary.
    """
    from vllm.tokenizers import get_tokenizer

    from vllm_diffusion.plugin import register

    folder, publishers_class = publisher(tmp_path)
    register()
    ours = get_tokenizer(str(folder))
    theirs = publishers_class.from_pretrained(folder)
    # The class itself, below vLLM's that caches.
    assert type(ours).__mro__[1].__module__.partition(".")[0] in ("transformers", "vllm_diffusion")
    assert (ours.mask_token_id, ours.eos_token_id) == (theirs.mask_token_id, theirs.eos_token_id)
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
