"""An update of weights: every tensor is checked under every name, all of it or nothing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import SHIPPED
from tests.support.quantized import quantized_checkpoint
from vllm_diffusion.families.diffusion_gemma.startup import DiffusionGemmaTensors
from vllm_diffusion.weights.update import ExpectedTensors, WeightUpdate
from vllm_diffusion.weights.weight_files import largest_magnitude, stored_tensors

pytestmark = pytest.mark.engine

SCALARS = tuple(
    f"model.{part}.layers.2.layer_scalar" for part in ("encoder.language_model", "decoder")
)
EMBEDDING = "model.decoder.embed_tokens.weight"


def expected_of(folder: Path) -> ExpectedTensors:
    from transformers import DiffusionGemmaConfig

    settings = json.loads((folder / "config.json").read_text())
    quantization = settings.get("quantization_config")
    return ExpectedTensors(
        DiffusionGemmaConfig.from_dict(settings), DiffusionGemmaTensors(), quantization
    )


@pytest.fixture(scope="module")
def expected() -> ExpectedTensors:
    return expected_of(SHIPPED)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return load_file(SHIPPED / "model.safetensors")


@pytest.fixture
def update(expected: ExpectedTensors) -> WeightUpdate:
    return WeightUpdate(expected)


def sent(update: WeightUpdate) -> dict[str, Tensor]:
    return dict(update.tensors())


def written(folder: Path, tensors: dict[str, Tensor], name: str = "update") -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / name)
    return folder / name


def refused(work: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        work()
    message = str(raised.value)
    assert "\n" not in message
    assert message.endswith(".")
    for part in (*parts, "othing was loaded"):
        assert part in message, message


@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_any_cut(
    expected: ExpectedTensors,
    weights: dict[str, Tensor],
    tmp_path_factory: pytest.TempPathFactory,
    random: Any,
    num_files: int,
) -> None:
    """However a checkpoint is cut into files, in whatever order: all of it, once, as it is."""
    folder, update = tmp_path_factory.mktemp("cut"), WeightUpdate(expected)
    names = sorted(weights)
    random.shuffle(names)
    cuts = sorted(random.sample(range(len(names)), num_files - 1))
    parts = zip([0, *cuts], [*cuts, len(names)], strict=True)
    wanted, came = {expected.tensor_of(name) for name in names}, set[str]()
    for index, (begin, end) in enumerate(parts):
        if begin == end:
            continue
        # The last file may hold nothing but the other name of a tensor that came.
        if came < wanted:
            with pytest.raises(ValueError, match="not sent"):
                update.check(is_whole=True)
        came |= {expected.tensor_of(name) for name in names[begin:end]}
        update.add(written(folder, {n: weights[n] for n in names[begin:end]}, str(index)))
    update.check(is_whole=True)
    found = sent(update)
    # Both of a layer's scalars are the same tensor of the model, and one of them stands for it.
    assert set(weights) - set(found) == {
        name for name in weights if name.endswith("layer_scalar") and name not in found
    }
    assert len(set(weights) - set(found)) == 4
    for name, tensor in found.items():
        assert torch.equal(tensor, weights[name])


def misfits(weights: dict[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], tuple[str, ...]]]:
    name = "model.decoder.layers.1.self_attn.q_proj.weight"
    shape = str(list(weights[name].shape))
    yield {"model.layers.0.nothing": torch.zeros(2)}, ("model.layers.0.nothing", "no tensor of")
    yield {name: weights[name].t()[:5]}, (name, "F32 [5, ", shape)
    yield {name: weights[name].flatten()}, (name, shape)
    yield {name: weights[name].to(torch.int32)}, (name, "I32", shape)
    yield {name: weights[name].to(torch.float8_e4m3fn)}, (name, "F8_E4M3", shape)
    # Under the encoder's name it is the same one.
    other = name.replace("decoder", "encoder.language_model")
    yield {other: weights[name][:3]}, (other, "F32 [3, ", shape)
    yield {name: weights[name], other: weights[name] + 1}, (name, other, "differ")
    yield {SCALARS[0]: torch.ones(1), SCALARS[1]: torch.full((1,), 2.0)}, (*SCALARS, "differ")
    yield {"lm_head.weight": weights[EMBEDDING][:, :7]}, ("lm_head.weight", "[320, 7]")
    head = {"lm_head.weight": weights[EMBEDDING] + 1, EMBEDDING: weights[EMBEDDING]}
    yield head, ("lm_head.weight", EMBEDDING, "differ")


def test_misfits(update: WeightUpdate, weights: dict[str, Tensor], tmp_path: Path) -> None:
    """Refused by name and file, with what was expected; what was sent before stays sent."""
    norm = "model.decoder.norm.weight"
    update.add(written(tmp_path, {norm: weights[norm]}, "before"))
    for index, (tensors, parts) in enumerate(misfits(weights)):
        # A tensor that fits, in the same file, is not taken either.
        fits = {"model.decoder.layers.0.input_layernorm.weight": torch.ones(128)}
        path = written(tmp_path, tensors | fits, f"misfit{index}")
        refused(lambda path=path: update.add(path), *parts, str(path))
    assert set(sent(update)) == {norm}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
)
def test_largest_magnitude(
    dtype: torch.dtype, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every value, wherever chunks end; FP8 has no infinity, and rounds one to NaN or its largest."""
    monkeypatch.setattr("vllm_diffusion.weights.weight_files._CHUNK_BYTES", 64)
    values = torch.linspace(-3, 2, 400).to(dtype)

    def largest(values: Tensor) -> float:
        (tensor,) = stored_tensors([written(tmp_path, {"values": values})])
        return largest_magnitude(tensor)

    assert largest(values) == values.float().abs().max()
    assert largest((-values.float()).to(dtype)) == values.float().abs().max()
    assert largest(values[:0]) == 0
    for place in (0, 37, 399):
        changed = values.float()
        changed[place] = value
        changed = changed.to(dtype)
        found = largest(changed)
        if changed.float().isfinite().all():
            assert found == changed.float().abs().max()
        else:
            assert not math.isfinite(found)
    if dtype == torch.float8_e4m3fn:
        for bits in (0x7F, 0xFF):
            changed = values.clone()
            changed.view(torch.uint8)[101] = bits
            assert math.isnan(largest(changed))


def test_not_finite(update: WeightUpdate, weights: dict[str, Tensor], tmp_path: Path) -> None:
    """Refused when it is sent, by its name; the rest of its file is not taken either."""
    name = "model.decoder.layers.1.self_attn.q_proj.weight"
    for index, value in enumerate((float("nan"), float("inf"))):
        for dtype in (torch.float32, torch.bfloat16):
            tensors = {EMBEDDING: weights[EMBEDDING], name: weights[name].to(dtype, copy=True)}
            tensors[name][5, 7] = value
            path = written(tmp_path, tensors, f"{index}{dtype}")
            refused(lambda path=path: update.add(path), name, str(path), "not finite")
    assert sent(update) == {}


def test_same_under_two_names(
    update: WeightUpdate, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """A trainer may send a shared tensor twice, if alike: also in different files."""
    update.add(written(tmp_path, {SCALARS[0]: torch.ones(1)}, "one"))
    update.add(written(tmp_path, {SCALARS[1]: torch.ones(1)}, "other"))
    update.add(written(tmp_path, {"lm_head.weight": weights[EMBEDDING]}, "head"))
    update.add(written(tmp_path, {EMBEDDING: weights[EMBEDDING]}, "embedding"))
    assert list(sent(update)) == [SCALARS[0], "lm_head.weight"]
    # A later value under the same name takes the place of the first.
    update.add(written(tmp_path, {SCALARS[0]: torch.zeros(1)}, "again"))
    assert sent(update)[SCALARS[0]] == 0


def test_experts_one_by_one(
    expected: ExpectedTensors, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """A trainer that has a matrix for each expert may send those in place of the fused ones."""
    split: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        stem, _, end = name.rpartition(".")
        if end == "gate_up_proj":
            for idx, (gate, up) in enumerate(chunked.chunk(2) for chunked in tensor):
                split |= {
                    f"{stem}.{idx}.gate_proj.weight": gate,
                    f"{stem}.{idx}.up_proj.weight": up,
                }
        elif name.endswith("experts.down_proj"):
            split |= {f"{stem}.{idx}.down_proj.weight": one for idx, one in enumerate(tensor)}
        else:
            split[name] = tensor
    assert len(split) > len(weights)
    update = WeightUpdate(expected)
    update.add(written(tmp_path, split))
    update.check(is_whole=True)
    dropped = next(name for name in split if ".experts.1." in name)
    del split[dropped]
    update = WeightUpdate(expected)
    update.add(written(tmp_path, split, "less"))
    refused(lambda: update.check(is_whole=True), dropped)


def test_damaged_files(update: WeightUpdate, weights: dict[str, Tensor], tmp_path: Path) -> None:
    """Not there, empty, cut short, none at all: refused by the file's name."""
    path = written(tmp_path, {EMBEDDING: weights[EMBEDDING]})
    whole = path.read_bytes()
    for length in (0, 7, 8, 60, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(lambda: update.add(path), str(path))
    path.write_bytes(whole + b"x")
    refused(lambda: update.add(path), str(path))
    # A header whose shape and bytes disagree.
    path.write_bytes(whole.replace(b"[320,128]", b"[319,128]"))
    refused(lambda: update.add(path), str(path))
    path.unlink()
    refused(lambda: update.add(path), str(path))
    refused(lambda: update.add(tmp_path), str(tmp_path), "no safetensors file")
    # Whoever opens it waits for somebody to write to it.
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path in (tmp_path, tmp_path / "pipe.safetensors"):
        refused(lambda path=path: update.add(path), "pipe.safetensors is a named pipe")
    for too_long in ("d/" * 2500, "x" * 300):
        refused(lambda name=too_long: update.add(tmp_path / name), "is not there")
    assert sent(update) == {}


def test_changed_since(update: WeightUpdate, weights: dict[str, Tensor], tmp_path: Path) -> None:
    """A file that was overwritten or deleted is noticed before anything is loaded, and sent anew."""
    path = written(tmp_path, {EMBEDDING: weights[EMBEDDING]})
    update.add(path)
    update.check(is_whole=False)
    path.unlink()
    refused(lambda: update.check(is_whole=False), str(path), "changed or taken away")
    written(tmp_path, {EMBEDDING: weights[EMBEDDING] + 1})
    refused(lambda: update.check(is_whole=False), str(path), "changed or taken away")
    update.add(path)
    update.check(is_whole=False)
    assert torch.equal(sent(update)[EMBEDDING], weights[EMBEDDING] + 1)


def test_quantised(tmp_path: Path) -> None:
    """Tensors are those of the format: packed weights, scales."""
    folder = quantized_checkpoint(tmp_path / "quantised", "fp8-dynamic", num_prompts=2)
    weights = load_file(folder / "model.safetensors")
    update = WeightUpdate(expected_of(folder))
    update.add(folder)
    update.check(is_whole=True)
    assert {name: t.dtype for name, t in sent(update).items()}.items() <= {
        name: t.dtype for name, t in weights.items()
    }.items()
    name = "model.decoder.layers.0.self_attn.q_proj.weight"
    path = written(tmp_path, {name: weights[name].float()})
    refused(lambda: update.add(path), name, "is F32", "F8_E4M3")
    for changed in (name, f"{name}_scale"):
        tensor = weights[changed].clone()
        # FP8's only number that is none.
        tensor.view(torch.uint8)[0, -1] = 0x7F
        if tensor.dtype != torch.float8_e4m3fn:
            tensor[0, 0] = float("inf")
        path = written(tmp_path, {changed: tensor})
        refused(lambda path=path: update.add(path), changed, "not finite")
