"""Loading refuses a checkpoint that differs from its config, by tensor and file.

Harmless oddities are served.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.engines.loading import load, load_in_stock, one_rank
from tests.support.models.checkpoints import SHIPPED, changed
from tests.support.models.quantized import quantized_checkpoint
from vllm_diffusion.families.diffusion_gemma.model import TwoScalarLayer
from vllm_diffusion.weights import loading
from vllm_diffusion.weights.loading import counted_downcasts

pytestmark = pytest.mark.engine

Tensors = dict[str, Tensor]
SDAR = SHIPPED.parent / "tiny_sdar"
DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the shipped checkpoints, and the first one in three formats."""
    folder = tmp_path_factory.mktemp("quantized")
    schemes = ("fp8-dynamic", "nvfp4", "fp8-static")
    made = {one: quantized_checkpoint(folder / one, one, num_prompts=2) for one in schemes}
    return made | {"bf16": SHIPPED, "sdar": SDAR}


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        load(folder, **options)
    message = str(raised.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


@pytest.mark.parametrize("name", ["bf16", "sdar", "fp8-dynamic", "nvfp4", "fp8-static"])
def test_good_checkpoints(
    name: str, sources: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoints that the other tests change load completely before the change."""
    model = load(sources[name])
    ours = [one.getMessage() for one in caplog.records if "vllm_diffusion" in one.name]
    assert not [one for one in ours if "will be ignored" in one]
    # Nothing of the watch remains.
    assert not any("CheckedLoading" in repr(vars(one)) for one in model.parameters())


def layer(*parts: str) -> str:
    return ".".join(["model.decoder.layers.1", *parts])


def drop(*names: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(name) for name in names]


def replace(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: make(tensors[name]).clone()})


def add(name: str, value: Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: value})


def with_a(value: float) -> Callable[[Tensor], Tensor]:
    """Return a function that puts a number in the place of a tensor's sixth."""

    def put(tensor: Tensor) -> Tensor:
        tensor.view(-1)[5] = value
        return tensor

    return put


def rename(old: str, new: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def copy_of(name: str, make: Callable[[Tensor], Tensor] = torch.clone) -> Callable[[Tensors], Any]:
    """Return the encoder's copy of a decoder's tensor."""
    other = name.replace(DECODER, ENCODER)
    return lambda tensors: tensors.update({other: make(tensors[name]).clone()})


SCALE = layer("experts.2.up_proj.weight_scale")
QUERY = layer("self_attn.q_proj.weight")
UP = layer("mlp.up_proj.weight")
NORM = layer("input_layernorm.weight")
SDAR_KEY = "model.layers.1.self_attn.k_proj.weight"
SDAR_UP = "model.layers.1.mlp.up_proj.weight"


BAD_TENSORS: list[tuple[str, Callable[[Tensors], Any], list[str]]] = [
    ("bf16", drop(NORM), [NORM, "should be in"]),
    ("bf16", drop("model.decoder.norm.weight"), ["norm.weight", "should be in"]),
    ("bf16", drop(layer("self_attn.k_proj.weight")), [layer("self_attn.k_proj.weight")]),
    ("bf16", drop(layer("mlp.gate_proj.weight")), [layer("mlp.gate_proj.weight")]),
    ("bf16", drop(layer("experts.down_proj")), ["layers.1.experts.", "down_proj"]),
    ("bf16", drop("model.decoder.self_conditioning.up_proj.weight"), ["self_conditioning.up"]),
    ("bf16", drop("model.decoder.embed_tokens.weight"), ["embed_tokens.weight"]),
    ("sdar", drop(SDAR_KEY), [SDAR_KEY, "should be in"]),
    ("sdar", drop("lm_head.weight"), ["lm_head.weight"]),
    ("fp8-dynamic", drop(SCALE), [SCALE, "is not"]),
    ("fp8-dynamic", drop(SCALE.removesuffix("_scale")), [SCALE.removesuffix("_scale")]),
    ("fp8-dynamic", drop(QUERY + "_scale"), [QUERY + "_scale"]),
    ("nvfp4", drop(layer("mlp.up_proj.weight_packed")), [layer("mlp.up_proj.weight_packed")]),
    ("nvfp4", drop(layer("experts.3.down_proj.weight_global_scale")), ["experts.3.down_proj"]),
    ("nvfp4", drop(layer("experts.0.gate_proj.weight_scale")), ["experts.0.gate_proj"]),
    ("fp8-static", drop(layer("self_attn.o_proj.input_scale")), ["o_proj.input_scale"]),
    ("bf16", replace(QUERY, lambda one: one[:-1]), [QUERY, "float32 [255, 128]"]),
    ("bf16", replace(QUERY, lambda one: torch.cat([one, one])), [QUERY]),
    ("bf16", replace(UP, lambda one: one[:, :-1]), [UP]),
    ("bf16", replace(UP, lambda one: torch.cat([one, one])), [UP]),
    ("bf16", replace(layer("experts.down_proj"), lambda one: one[:, :, :-2]), ["down_proj"]),
    ("bf16", replace(layer("experts.gate_up_proj"), lambda one: one[:-1]), ["gate_up_proj"]),
    ("bf16", replace(NORM, lambda one: one[:-1]), [NORM]),
    ("bf16", replace(NORM, lambda one: torch.cat([one, one])), [NORM]),
    ("sdar", replace(SDAR_KEY, lambda one: torch.cat([one, one])), [SDAR_KEY]),
    ("sdar", replace("model.embed_tokens.weight", lambda one: one[:-1]), ["embed_tokens"]),
    ("fp8-dynamic", replace(SCALE, lambda one: one[:-1]), [SCALE]),
    # FP8 holds none of these numbers.
    (
        "fp8-dynamic",
        replace(SCALE.removesuffix("_scale"), lambda one: one.float() * 1.3),
        ["float8_e4m3fn"],
    ),
    ("bf16", replace(UP, lambda one: one.to(torch.float8_e4m3fn)), [UP, "float8_e4m3fn"]),
    ("bf16", replace(UP, lambda one: one.view(torch.uint8)), [UP, "uint8"]),
    ("bf16", copy_of(UP, lambda one: one + 1), [UP, ENCODER, "differ"]),
    (
        "bf16",
        copy_of(layer("experts.down_proj"), lambda one: one.flip(0)),
        [layer("experts.down_proj"), ENCODER, "differ"],
    ),
    ("sdar", rename(SDAR_KEY, SDAR_KEY.replace("k_proj", "key")), ["self_attn.key.weight"]),
    ("sdar", rename(SDAR_KEY, f"{SDAR_KEY}_packed"), [f"{SDAR_KEY}_packed", "no place"]),
    ("sdar", rename(SDAR_UP, f"{SDAR_UP}_packed"), [f"{SDAR_UP}_packed", "no place"]),
    ("bf16", rename(UP, f"{UP}_packed"), [f"{UP}_packed", "no place"]),
    ("sdar", add("model.layers.99.mlp.up_proj.weight", torch.ones(2, 2)), ["layers.99", "config"]),
    ("bf16", add("model.decoder.layers.99.layer_scalar", torch.ones(1)), ["layers.99"]),
    ("fp8-dynamic", add(layer("experts.99.up_proj.weight"), torch.ones(2, 2)), ["experts.99"]),
    ("bf16", add(layer("self_attn.q_proj.bias"), torch.ones(128)), ["q_proj.bias"]),
    ("bf16", add(layer("post_mixer_norm.weight"), torch.ones(64)), ["post_mixer_norm"]),
    ("sdar", replace(SDAR_UP, with_a(torch.inf)), [SDAR_UP, "not finite"]),
    ("sdar", replace(SDAR_UP, lambda one: with_a(torch.inf)(one).half()), [SDAR_UP, "not finite"]),
    ("bf16", replace(layer("experts.down_proj"), with_a(torch.nan)), ["experts.down_proj", "not"]),
    ("bf16", replace("model.decoder.embed_tokens.weight", with_a(torch.nan)), ["embed_tokens"]),
    ("fp8-dynamic", replace(SCALE, with_a(-torch.inf)), [SCALE, "not finite"]),
    (
        "fp8-dynamic",
        replace(SCALE.removesuffix("_scale"), with_a(torch.nan)),
        [SCALE.removesuffix("_scale"), "not finite"],
    ),
]


@pytest.mark.parametrize(("source", "change", "words"), BAD_TENSORS)
def test_bad_tensors(
    source: str,
    change: Callable[[Tensors], Any],
    words: list[str],
    sources: dict[str, Path],
    tmp_path: Path,
) -> None:
    """The message names the tensor and its file, or the folder that lacks it."""
    folder = changed(sources[source], tmp_path / "bad", change)
    message = refusal(folder)
    assert all(word in message for word in [*words, str(folder)]), message
    if "should be in" not in message:
        assert str(folder / "model.safetensors") in message


def test_numbers_beyond_the_dtype(tmp_path: Path) -> None:
    """Numbers that float16 cannot hold are refused with the dtype to set, which loads them."""
    folder = changed(SDAR, tmp_path / "large", replace(SDAR_UP, with_a(1e6)))
    message = refusal(folder, dtype="float16")
    assert SDAR_UP in message
    assert "up to 1e+06, which torch.float16 cannot hold; set --dtype bfloat16" in message
    load(folder, dtype="bfloat16")


def test_what_no_tensor_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that is not finite where no tensor was loaded is served: its file decides."""
    monkeypatch.setattr(loading, "is_finite", lambda tensor: False)
    load(SDAR)


def num_values(folder: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())


@pytest.mark.slow
@pytest.mark.parametrize("source", ["bf16", "fp8-dynamic", "nvfp4", "fp8-static"])
def test_bad_tensors_in_stock(source: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """vLLM's own class fails without the file's name, or silently serves something else."""
    whole = sources[source]
    changes = [change for its_source, change, _ in BAD_TENSORS if its_source == source]
    folders = [changed(whole, tmp_path / str(i), change) for i, change in enumerate(changes)]
    good, *outcomes = load_in_stock(whole, *folders)
    assert good == []
    served = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, list)]
    assert len(served) > len(outcomes) // 2
    for i in served:
        # Where nothing differs, values of the file are in no parameter: a bias, halves of matrices.
        assert outcomes[i] or num_values(folders[i]) > num_values(whole)
    assert not [one for one in outcomes if isinstance(one, str) and "model.safetensors" in one]


@pytest.mark.parametrize(
    ("source", "change", "named"),
    [
        # Both copies of a shared tensor, and either of two scalars.
        ("bf16", copy_of(UP), None),
        ("bf16", copy_of(layer("experts.gate_up_proj")), None),
        ("fp8-dynamic", copy_of(SCALE), None),
        ("nvfp4", copy_of(layer("mlp.up_proj.weight_packed")), None),
        ("bf16", drop("model.encoder.language_model.layers.1.layer_scalar"), None),
        ("bf16", rename(UP, UP.replace(DECODER, ENCODER)), None),
        # What other programs add.
        ("bf16", add("model.decoder.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8)), None),
        ("bf16", add("mtp.layers.0.mlp.up_proj.weight", torch.ones(2, 2)), "mtp"),
        ("sdar", add("value_head.weight", torch.ones(1, 64)), "value_head.weight"),
        ("sdar", add("model.layers.1.self_attn.q_proj.bias", torch.zeros(8)), None),
        ("fp8-dynamic", add(layer("router.proj.weight_scale"), torch.ones(4, 1)), "router.proj"),
        ("bf16", add(layer("mlp.observer.statistics"), torch.ones(4)), "observer.statistics"),
    ],
)
def test_oddities_that_harm_nothing(
    source: str,
    change: Callable[[Tensors], Any],
    named: str | None,
    sources: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Harmless oddities load with the original values and at most one warning."""
    folder = changed(sources[source], tmp_path / "odd", change)
    caplog.clear()
    odd = dict(load(folder).named_parameters())
    lines = [one for one in caplog.messages if "will be ignored" in one]
    assert len(lines) == (named is not None)
    assert named is None or (named in lines[0] and str(folder) in lines[0])
    for name, value in load(sources[source]).named_parameters():
        assert torch.equal(odd[name].view(torch.uint8), value.view(torch.uint8)), name


@pytest.mark.parametrize(
    "options", [{"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0, "video": 0}}]
)
def test_a_save_of_the_language_model(options: dict[str, Any], tmp_path: Path) -> None:
    """A save without the encoder is served without pictures, and refused with them."""

    def drop_encoder(tensors: Tensors) -> None:
        for name in [one for one in tensors if one.startswith("model.encoder.")]:
            del tensors[name]

    folder = changed(SHIPPED, tmp_path / "text", drop_encoder)
    load(folder, **options)
    assert "vision_tower" in refusal(folder)


def test_layer_scalars(tmp_path: Path) -> None:
    """Encoder and decoder have a scalar each per layer, and a single one counts for both."""
    names = [f"{stack}layers.1.layer_scalar" for stack in (DECODER, ENCODER)]
    without = changed(SHIPPED, tmp_path / "none", drop(*names))
    assert "layers.1.layer_scalar" in refusal(without)
    apart = changed(SHIPPED, tmp_path / "two", replace(names[1], lambda one: one * 2 + 1))
    decoder = load_file(apart / "model.safetensors")[names[0]]
    layers = load(apart).model.layers
    assert [type(one) is TwoScalarLayer for one in layers] == [False, True, False, False]
    assert torch.equal(layers[1].decoder_scalar, decoder)
    assert torch.equal(layers[1].encoder_scalar, decoder * 2 + 1)
    alone = changed(SHIPPED, tmp_path / "one", drop(names[0]))
    assert torch.equal(load(alone).model.layers[1].decoder_scalar, decoder)


@pytest.mark.parametrize(
    ("ignored", "words"),
    [
        # Vision is ignored by nobody, so it must be quantised, and is not.
        (["re:.*(router|lm_head|self_cond).*"], ["vision", "float32", "ignore list"]),
        # Ignored, and quantised all the same.
        (["re:.*(router|vision|lm_head|self_cond|o_proj).*"], ["o_proj.weight", "float8"]),
        # Self-conditioning is quantised by nobody, whether a recipe names it or not.
        (["re:.*(router|vision|lm_head).*"], None),
        # A recipe for models with and without an audio tower.
        (
            [
                "lm_head",
                *(f"re:.*{part}.*" for part in ("vision", "audio", "embed", "router", "self_cond")),
            ],
            None,
        ),
        # The encoder's names, the decoder's, or both at once.
        (
            [
                "re:model.encoder.(vision_tower|embed_vision)",
                r"re:model\.decoder\.self_cond",
                "re:model.encoder.language_model.*router",
                "lm_head",
                "model.decoder.layers.1.mlpp",
            ],
            None,
        ),
    ],
)
def test_ignore_lists(
    ignored: list[str], words: list[str] | None, sources: dict[str, Path], tmp_path: Path
) -> None:
    """A wrong ignore list is refused with the modules that it concerns, and entries that match
    nothing ignore nothing.
    """
    folder = changed(
        sources["fp8-dynamic"],
        tmp_path / "recipe",
        reconfigure=lambda config: config["quantization_config"].update(ignore=ignored),
    )
    if words is None:
        load(folder)
        return
    message = refusal(folder)
    assert all(word in message for word in words), message


def test_an_update_is_not_a_checkpoint(tmp_path: Path) -> None:
    """An update of loaded or dummy weights may have only some of the tensors."""
    tensors = load_file(SHIPPED / "model.safetensors")
    load(SHIPPED).load_weights([(NORM, tensors[NORM] + 1)])  # type: ignore[operator]
    made_up = load(changed(SHIPPED, tmp_path / "dummy"), load_format="dummy")
    made_up.load_weights([(NORM, tensors[NORM])])  # type: ignore[operator]


def load_two_layers(dtype):
    from vllm.model_executor.models.utils import AutoWeightsLoader

    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(torch.bfloat16)
    weights = [(name, torch.ones(p.shape, dtype=dtype)) for name, p in model.named_parameters()]
    return AutoWeightsLoader(model).load_weights(weights)


def test_downcasts_are_one_line(vllm_log):
    """vLLM's four warnings of tensors cast to bfloat16 become one line with their number."""
    with counted_downcasts():
        assert len(load_two_layers(torch.float32)) == 4
    assert [record.getMessage() for record in vllm_log.records] == [
        "4 tensors of the checkpoint are torch.float32, and served in torch.bfloat16."
    ]
    vllm_log.clear()
    load_two_layers(torch.float32)
    assert [record.levelno for record in vllm_log.records] == [logging.WARNING] * 4


def test_what_fits_is_not_mentioned(vllm_log):
    """Tensors that need no cast are not logged, and other warnings are kept."""
    with counted_downcasts():
        load_two_layers(torch.bfloat16)
        logging.getLogger("vllm.model_executor.models.utils").warning("Something else")
    assert [record.getMessage() for record in vllm_log.records] == ["Something else"]
