"""Presets of published drafts: their targets, and what is known of each (``presets.toml``)."""

import json
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_FILE = Path(__file__).with_name("presets.toml")
# z-lab's drafts, where nothing else is stated: its command line for vLLM proposes 15.
DEFAULT_BLOCK = 16


@dataclass(frozen=True)
class Preset:
    """A target and the draft that was published for it.

    Attributes:
        target: Its repository.
        draft: The draft's repository.
        causal: Which of its layers see no row ahead.
        window: What is known of one.
        listed_as: What the source calls the target, where its repository is inferred from that.
        block: Anchor and masks of a block; 0 where the sources do not say.
        issues: What users reported.
        options: Further options of ``vllm serve`` that its publisher gives.
        kept: Tokens kept per verification by data set, as the publisher gives them for drafts of
            the whole block; empty where that is not known.
        kept_with: How the publisher measured them.
        sources: Where block, causal, window, kept tokens and options are from.
    """

    target: str
    draft: str
    causal: str = "not known here; vLLM takes layers of type sliding_attention for causal, unless config.json sets it"
    window: str = "not known here; drafting.window of --additional-config sets one"
    listed_as: str = ""
    block: int = 0
    issues: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    kept: Mapping[str, float] = field(default_factory=dict)
    kept_with: str = ""
    sources: tuple[str, ...] = ()

    @property
    def least_kept(self) -> float:
        """The lowest of the publisher's figures; 0 where there are none.

        Text of users may be as hard as the hardest of the data sets, so no other figure is one that
        a server has to reach.
        """
        return min(self.kept.values(), default=0.0)

    @property
    def figures(self) -> str:
        """The publisher's figures and how they were measured, as text; empty without figures."""
        each = ", ".join(f"{data_set} {tokens:.2f}" for data_set, tokens in self.kept.items())
        return f"{each} ({self.kept_with})" if each else ""

    @property
    def command(self) -> str:
        """Command that serves both, for a shell, with the publisher's block where that of the draft
        is unknown.
        """
        spec = {
            "method": "dflash",
            "model": self.draft,
            "num_speculative_tokens": (self.block or DEFAULT_BLOCK) - 1,
        }
        arguments = ["vllm", "serve", self.target, "--speculative-config", json.dumps(spec)]
        return shlex.join([*arguments, *self.options])


def presets() -> list[Preset]:
    """Read all presets, in the order of the file."""
    content = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    general = content["general"]["issues"]
    return [
        Preset(**entry | {"issues": (*entry.get("issues", ()), *general)})
        for entry in content["preset"]
    ]


def preset_of(draft: str) -> Preset | None:
    """Return the preset of a draft by the last part of its name: copies in a folder or of another
    owner are the same draft. ``None`` if it is in none.
    """
    name = draft.rstrip("/").rpartition("/")[2].lower()
    named = (preset for preset in presets() if preset.draft.rpartition("/")[2].lower() == name)
    return next(named, None)
