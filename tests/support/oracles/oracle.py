"""Hugging Face's ``generate`` with our random draws, step by step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attention_kernels.noise import Purpose, gumbel_noise, random_words, uniform_tokens


@dataclass
class OracleRun:
    """One generation.

    Attributes:
        tokens: What was generated, up to and including the first end token.
        logits: Per denoising step, [canvas_length, vocab_size], softcapped, before temperature.
        canvases: Per denoising step, the canvas it started from, [canvas_length].
        steps_per_canvas: Denoising steps of each canvas.
    """

    tokens: list[int]
    logits: list[Tensor] = field(default_factory=list)
    canvases: list[Tensor] = field(default_factory=list)
    steps_per_canvas: list[int] = field(default_factory=list)


class Draws:
    """Stands in for ``torch.randint`` and ``torch.multinomial`` inside ``generate``."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        with (
            mock.patch("torch.randint", self.randint),
            mock.patch("torch.multinomial", self.multinomial),
        ):
            yield


class OurNoise(Draws):
    """Draws with this package's noise.

    ``generate`` draws in a fixed order: a canvas's first tokens, then in each step candidates and
    new noise.
    """

    def __init__(self, seed: int) -> None:
        self.seed = torch.tensor([seed])
        self.canvas_idx = -1
        self.step = -1
        self._drew_candidates = False

    def randint(self, low: int, high: int, size: tuple[int, int], **_: Any) -> Tensor:
        assert low == 0
        assert size[0] == 1
        purpose = Purpose.RENOISE
        if not self._drew_candidates:
            self.canvas_idx += 1
            self.step = -1
            purpose = Purpose.INITIAL
        self._drew_candidates = False
        return uniform_tokens(
            self.seed,
            torch.tensor([self.canvas_idx]),
            torch.tensor([max(self.step, 0)]),
            size[1],
            high,
            purpose,
        )

    def multinomial(self, probs: Tensor, num_samples: int) -> Tensor:
        assert num_samples == 1
        self.step += 1
        self._drew_candidates = True
        rows, vocab_size = probs.shape
        words = random_words(
            self.seed.expand(rows),
            torch.full((rows,), self.canvas_idx),
            torch.full((rows,), self.step),
            torch.arange(rows),
            vocab_size,
        )
        return (probs.log() + gumbel_noise(words)).argmax(dim=-1, keepdim=True)


class ForcedCanvases(Draws):
    """Leads ``generate`` through given canvases.

    What is returned for candidates and for new noise alike is the next canvas, so it is that
    whatever was accepted.
    """

    def __init__(self, canvases: list[Tensor]) -> None:
        self.canvases = canvases
        self.index = -1

    def randint(self, low: int, high: int, size: tuple[int, int], **_: Any) -> Tensor:
        # A canvas's last draw of candidates already moved on to the first one of the next canvas.
        self.index = max(self.index, 0)
        return self._next()[None]

    def multinomial(self, probs: Tensor, num_samples: int) -> Tensor:
        self.index += 1
        return self._next()[:, None]

    def _next(self) -> Tensor:
        # After the last step of the last canvas there is none, and nobody looks.
        return self.canvases[min(self.index, len(self.canvases) - 1)]


class Oracle:
    """``transformers``' DiffusionGemma, batch 1, DynamicCache, eager attention."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import DiffusionGemmaForBlockDiffusion

        self.model = DiffusionGemmaForBlockDiffusion.from_pretrained(
            checkpoint, dtype=dtype, attn_implementation="eager"
        ).eval()
        self.end_tokens = set(self.model.generation_config.eos_token_id)
        self._runs: dict[Any, OracleRun] = {}

    @contextmanager
    def _recording(
        self, draws: Draws, before: Callable[[dict[str, Any]], None] = lambda inputs: None
    ) -> Iterator[list[Tensor]]:
        """Let these draws decide, and record the logits of each step, whose inputs ``before`` may
        change.
        """
        logits: list[Tensor] = []
        original = self.model.forward

        def forward(*args: Any, **inputs: Any) -> Any:
            before(inputs)
            output = original(*args, **inputs)
            logits.append(output.logits[0].detach().float())
            return output

        with draws.installed(), mock.patch.object(self.model, "forward", forward):
            yield logits

    def generate(
        self,
        prompt: list[int],
        *,
        seed: int,
        max_tokens: int,
        ignore_eos: bool = False,
        **kwargs: Any,
    ) -> OracleRun:
        """Generate from token ids with our noise of ``seed``; cache the run."""
        wanted = (seed, max_tokens, ignore_eos, *sorted(kwargs.items()))
        asked = (self.model, tuple(prompt), *wanted)
        if asked not in self._runs:
            self._runs[asked] = self._generate(prompt, seed, max_tokens, ignore_eos, **kwargs)
        return self._runs[asked]

    def _generate(
        self, prompt: list[int], seed: int, max_tokens: int, ignore_eos: bool, **kwargs: Any
    ) -> OracleRun:
        run = OracleRun(tokens=[])
        noise = OurNoise(seed)

        def count(inputs: dict[str, Any]) -> None:
            run.canvases.append(inputs["decoder_input_ids"][0].clone())
            if noise.step < 0:
                run.steps_per_canvas.append(0)
            run.steps_per_canvas[-1] += 1

        if ignore_eos:
            kwargs["eos_token_id"] = None
        with self._recording(noise, count) as run.logits:
            output = self.model.generate(
                torch.tensor([prompt]), max_new_tokens=max_tokens, **kwargs
            )
        tokens = output.sequences[0, len(prompt) :].tolist()
        for i, token in enumerate(tokens):
            if token in self.end_tokens and not ignore_eos:
                tokens = tokens[: i + 1]
                break
        run.tokens = tokens[:max_tokens]
        return run

    def follow(
        self, prompt: list[int], canvases: list[Tensor], logits: list[Tensor], **kwargs: Any
    ) -> list[Tensor]:
        """The logits of each step, given what every step before it was in another run.

        Unlike whole generations of random weights, where a rounding error grows a thousandfold in
        a few steps, this compares each step by itself.

        Args:
            prompt: Token ids.
            canvases: Per step, [canvas_length], what the step started from.
            logits: Per step, [canvas_length, vocab_size], softcapped, before temperature; they are
                what the step after is conditioned on.
            kwargs: For ``generate``, an image for example.
        """
        config = self.model.generation_config
        num_steps = config.max_denoising_steps

        def condition(inputs: dict[str, Any]) -> None:
            step = len(ours)
            if inputs.get("self_conditioning_logits") is not None:
                remaining = num_steps - (step - 1) % num_steps
                temperature = config.t_min + (config.t_max - config.t_min) * remaining / num_steps
                inputs["self_conditioning_logits"] = (logits[step - 1] / temperature)[None]

        with self._recording(ForcedCanvases(canvases), condition) as ours:
            self.model.generate(
                torch.tensor([prompt]),
                max_new_tokens=len(canvases) // num_steps * canvases[0].shape[0],
                eos_token_id=None,
                stability_threshold=num_steps,
                **kwargs,
            )
        return ours

    def first_step(self, prompt: list[int], canvas: list[int]) -> Tensor:
        """Return logits [canvas_length, vocab_size] of one step on ``canvas`` after ``prompt``."""
        with self._recording(ForcedCanvases([torch.tensor(canvas)])) as logits:
            self.model.generate(
                torch.tensor([prompt]), max_new_tokens=len(canvas), max_denoising_steps=1
            )
        return logits[0]
