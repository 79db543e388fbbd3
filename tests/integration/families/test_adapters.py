"""With LoRA adapters, masked families give the published loop's tokens on PEFT's model."""

from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.support.engines.engine import TracedEngine, tokens_of
from tests.support.engines.generate import tokens_of_batch
from tests.support.families import makers
from tests.support.families.cases import EVERY_CASE, expected
from tests.support.families.llada2_model import separate_experts
from tests.support.families.makers import LLaDA
from tests.support.families.model import prompt_of
from tests.support.models.adapters import LINEAR, adapt, rename

pytestmark = pytest.mark.engine


# PEFT's modules of each family's layers, experts among them.
TARGETS: dict[str, Any] = {
    **dict.fromkeys(EVERY_CASE, rf".*\.(self_attn|mlp)\.{LINEAR}"),
    **dict.fromkeys(
        ("llada2.0", "llada2.1", "llada2.2"),
        r".*\.(query_key_value|dense|gate_proj|up_proj|down_proj)",
    ),
    **dict.fromkeys(("sdar-moe", "rnd1"), rf".*\.(self_attn|experts\.\d+)\.{LINEAR}"),
    # One of its layers has no experts.
    "llada-moe": rf".*\.(self_attn|mlp|experts\.\d+)\.{LINEAR}",
}
# The router of the experts is not a module to PEFT, but a parameter.
ROUTERS = dict.fromkeys(
    ("sdar-moe", "rnd1", "llada-moe", "llada2.0", "llada2.1", "llada2.2"), ["mlp.gate.weight"]
)


class Adapted:
    """A family's checkpoint with two adapters, and its own model with each of them and with none.

    Attributes:
        checkpoint: Its folder.
        adapters: Their folders, by number.
        work: Number of the adapter or 0, prompt, and what is asked.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._case = EVERY_CASE[name]
        self.checkpoint = self._case.make().save(folder / "checkpoint")
        self.adapters = {i: folder / str(i) for i in (1, 2)}
        self._models = {0: self._case.make()}
        for i, path in self.adapters.items():
            model = self._models[i] = self._case.make()
            separate_experts(model.body)
            adapted = adapt(
                model.body,
                path,
                seed=i,
                rank=2 * i,
                target_modules=TARGETS[name],
                target_parameters=ROUTERS.get(name),
            )
            # What PEFT changed in place is called as before.
            assert adapted.base_model.model is model.body
            if name == "nemotron":
                rename(path, lambda module: module.replace("model.", "encoder.", 1))
            if name == "llada":
                rename(path, LLaDA.published_name)
        wanted = [self._case.wanted(), self._case.wanted(temperature=1.0, seed=3)]
        self.work = [
            (i, prompt_of(n, seed=n), one) for i in self._models for n in (5, 33) for one in wanted
        ]
        self.options: dict[str, Any] = {
            "max_model_len": 256,
            "max_num_seqs": 8,
            "enable_lora": True,
            "max_loras": 2,
            "max_lora_rank": 8,
            **self._case.options,
        }

    def check(self, answers: list[list[int]]) -> None:
        """Check that each answer is the published loop's, and that the answers differ."""
        for (i, prompt, one), answer in zip(self.work, answers, strict=True):
            tokens = expected(self._case, self._models[i], prompt, one).tokens
            assert answer == tokens, (i, len(prompt), one)
        assert len(set(map(tuple, answers))) > len(self.work) // 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EVERY_CASE)
def test_tokens(name: str, tmp_path: Path) -> None:
    """In one batch, two adapters and the plain model give the loop's tokens, greedy and drawn."""
    adapted = Adapted(name, tmp_path)
    with TracedEngine(adapted.checkpoint, **adapted.options) as engine:
        outputs = engine.outputs(
            [prompt for _, prompt, _ in adapted.work],
            [one.sampling_params() for *_, one in adapted.work],
            lora_request=[
                LoRARequest(str(i), i, str(adapted.adapters[i])) if i else None
                for i, *_ in adapted.work
            ],
        )
    adapted.check(tokens_of(outputs))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["nemotron", "uno", "uno_k2"])
def test_drafts(family: str, tmp_path: Path) -> None:
    """With ``linear_spec`` the checkpoint's draft adapter acts next to a request's adapter.

    Tokens are those of the autoregressive mode in one process, with the request's adapter alone.
    """
    # With adapters of requests K2-Horizon's heads are rotated whole.
    sizes = {"rope_head_dim": 32} if family == "uno_k2" else {}
    model = getattr(makers, family)(**sizes)
    checkpoint = model.save(tmp_path / "checkpoint")
    adapt(model.body, tmp_path / "adapter", seed=1, target_modules=TARGETS["nemotron"])
    if family == "nemotron":
        rename(tmp_path / "adapter", lambda module: module.replace("model.", "encoder.", 1))
    params = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    plain = [{"prompt": prompt_of(length, seed=length), "params": params} for length in (5, 33, 70)]
    adapter = ("adapter", 1, str(tmp_path / "adapter"))
    options = {"max_model_len": 256, "max_num_seqs": 4, "enable_lora": True, "max_lora_rank": 8}
    options |= model.options
    requests = plain + [request | {"adapter": adapter} for request in plain]
    drafted, alone = (
        tokens_of_batch(
            checkpoint, requests, **options, additional_config={"diffusion": {"rule": rule}}
        )
        for rule in ("linear_spec", "autoregressive")
    )
    assert drafted == alone
    assert drafted[: len(plain)] != drafted[len(plain) :]
