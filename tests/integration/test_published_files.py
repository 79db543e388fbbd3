"""Starts take from published files what their publishers' code and files say, adapters too."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.engines.engine import TracedEngine
from tests.support.engines.vllm_configs import configure
from tests.support.families.published import (
    INDEX,
    Expected,
    PublishedFiles,
    adapters,
    expected,
    families,
    files_of,
    published_files,
    shapes_of,
    tensors_of,
)
from vllm_diffusion.families.nemotron.startup import find_draft_lora
from vllm_diffusion.startup.plan import DiffusionPlan, spec_of
from vllm_diffusion.startup.published_checkpoints import checkpoint_families
from vllm_diffusion.weights.adapters.support import (
    CONFIG,
    WEIGHTS,
    AdapterSupport,
    Module,
    adapted_modules,
)

pytestmark = pytest.mark.engine


def config_of(folder: Path, **options: Any) -> Any:
    """Return vLLM's configuration of a checkpoint, as a server makes it before it loads weights."""
    own = {"max_model_len": None, "load_format": "dummy", "skip_tokenizer_init": True}
    return configure(folder, **own, **options)


def served(folder: Path) -> dict[str, Any]:
    """Return what a start makes of a checkpoint, by the names of the table."""
    # DiffusionGemma's tokenizer and preprocessor, which pictures need, were not found.
    has_pictures = '"vision_config"' in (folder / "config.json").read_text()
    options = {"language_model_only": True} if has_pictures else {}
    config = config_of(folder, **options)
    model, spec = config.model_config, spec_of(config.model_config)
    assert spec is not None
    ends = model.try_get_generation_config().get("eos_token_id")
    ends = getattr(model.hf_config, "eos_token_id", None) if ends is None else ends
    return {
        "architecture": model.architecture,
        "rule": spec.ways[0].name,
        "settings": dict(spec.settings),
        "block": spec.block_length({}),
        "steps": spec.max_denoising_steps,
        "mask": spec.mask_token_id,
        "ends": ends if isinstance(ends, list) else [ends],
        "window": config.cache_config.sliding_window,
        "context": model.max_model_len,
        "sampling": model.get_diff_sampling_param(),
    }


def name_of(row: Expected) -> str:
    return f"{row.id} {row.files.revision}".strip()


@pytest.mark.parametrize("row", expected(), ids=name_of)
def test_what_comes_out(row: Expected, tmp_path: Path) -> None:
    """A start on the published files has the rule, settings, lengths, tokens and sampling that the
    publisher's code and files say.
    """
    wanted = dict(row.values)
    found = served(row.files.write(tmp_path, row.id))
    if found["ends"] == [None]:
        # The tokenizer's own token ends an answer then.
        end = row.files.files.get("tokenizer_config.json", {}).get("eos_token")
        found["ends"] = [] if end is None else [end]
    wanted.pop("parsers", None)
    assert found == wanted


# One of each family, without those whose first layers take more memory than a small machine has.
ENGINES = {row.values["architecture"]: row for row in reversed(expected()) if "flash" not in row.id}


@pytest.mark.slow
@pytest.mark.parametrize("row", ENGINES.values(), ids=name_of)
def test_two_layers_answer(row: Expected, tmp_path: Path) -> None:
    """An engine of two layers of published width, with dummy weights in the published dtype,
    answers with tokens that are not masks.
    """
    from vllm import SamplingParams

    def with_two_layers(config: dict[str, Any]) -> dict[str, Any]:
        layers = {"num_hidden_layers": 2, "n_layers": 2}
        changed = config | {name: layers[name] for name in config if name in layers}
        if "layer_types" in config:
            changed["layer_types"] = [config["layer_types"][0], config["layer_types"][-1]]
        if "text_config" in config:
            changed["text_config"] = with_two_layers(config["text_config"])
        return changed

    files = dict(row.files.files) | {"config.json": with_two_layers(row.files.config)}
    folder = PublishedFiles(row.id, "", files, {}).write(tmp_path)
    options = {"language_model_only": True} if "text_config" in files["config.json"] else {}
    with TracedEngine(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=2,
        **options,
    ) as engine:
        params = SamplingParams(
            max_tokens=16,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            seed=1,
            extra_args={"diffusion_max_steps": 4},
        )
        (output,) = engine.outputs([list(range(1000, 1040))], [params])
    tokens = list(output.outputs[0].token_ids)
    assert len(tokens) == 16
    assert row.values.get("mask") not in tokens


def test_each_value_has_a_source() -> None:
    """The table names what says each of its values."""
    for family in families():
        values = set(family["values"])
        for row in family["checkpoint"]:
            values |= set(row.get("values", ()))
        assert values <= set(family["sources"]), family["name"]


def test_commands_name_the_parser_of_the_template() -> None:
    """A family whose template writes tool calls has the parser of their form in its command."""
    commands = {
        checkpoint.id: family.command(checkpoint)
        for family in checkpoint_families()
        for checkpoint in family.checkpoint
    }
    for row in expected():
        if (parser := row.values.get("parsers")) and row.id in commands:
            assert f"--tool-call-parser {parser} " in f"{commands[row.id]} ", row.id


FLAGGED = {
    row.files.id: row.files for row in expected() if "use_sliding_window" in row.files.config
}


@pytest.mark.parametrize("files", FLAGGED.values(), ids=lambda files: files.id)
def test_no_window_without_the_flag(files: PublishedFiles, tmp_path: Path) -> None:
    """No published model that denoises masks has a sliding window, whatever number stands beside
    the flag that is off.
    """
    assert files.config["use_sliding_window"] is False
    folder = files.write(tmp_path)
    config = config_of(folder, hf_overrides={"sliding_window": 64})
    assert config.cache_config.sliding_window is None
    assert config.model_config.hf_text_config.sliding_window is None


def test_a_window_that_is_on_is_refused(tmp_path: Path) -> None:
    """A checkpoint some of whose layers have a window is refused with the field's name, and one
    whose window begins after its last layer is served without.
    """
    files = files_of("JetLM/SDAR-1.7B-Chat")
    folder = files.write(tmp_path)
    window = {"use_sliding_window": True, "sliding_window": 16}
    with pytest.raises(ValueError, match="sliding_window=16 in config.json"):
        config_of(folder, hf_overrides=window | {"max_window_layers": 2})
    config = config_of(folder, hf_overrides=window | {"max_window_layers": 28})
    assert config.cache_config.sliding_window is None


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("JetLM/SDAR-8B-Chat", "INFO"),
        ("JetLM/SDAR-8B-Chat-b32", "INFO"),
        ("models--JetLM--SDAR-8B-Chat-b16/snapshots/0a1b", "INFO"),
        ("mine/sdar-8b-tuned-b8", "INFO"),
        ("mine/checkpoint-500", "WARNING"),
        ("b32/SDAR-8B-Chat-b12", "WARNING"),
    ],
)
def test_a_start_says_which_block_it_took(
    name: str, level: str, tmp_path: Path, start_log: pytest.LogCaptureFixture
) -> None:
    """A start logs the length of blocks with what names it, and warns where it is a guess."""
    folder = files_of("JetLM/SDAR-8B-Chat").write(tmp_path, name)
    spec = spec_of(config_of(folder).model_config)
    assert spec is not None
    named = re.search(r"-b(8|16|32)(?!\d)", name.split("b32/")[-1])
    assert spec.length == (int(named[1]) if named else 4)
    said = [record for record in start_log.records if "blocks of" in record.getMessage()]
    assert [record.levelname for record in said] == [level]
    assert f"blocks of {spec.length} positions" in said[0].getMessage()


def test_a_length_that_the_operator_sets(
    tmp_path: Path, start_log: pytest.LogCaptureFixture
) -> None:
    """The operator's length of blocks is taken without a word about the file's."""
    folder = files_of("JetLM/SDAR-8B-Chat").write(tmp_path, "mine/checkpoint-500")
    spec = spec_of(config_of(folder, diffusion_config={"canvas_length": 32}).model_config)
    assert spec is not None
    assert (spec.length, spec.max_denoising_steps) == (32, 32)
    assert not [record for record in start_log.records if "blocks of" in record.getMessage()]


def test_settings_that_a_publisher_names_otherwise(tmp_path: Path) -> None:
    """Names of Dream's own file are read where somebody chose their values, and null is what is
    left out.
    """
    dream = files_of("Dream-org/Dream-v0-Instruct-7B")
    generation = {
        name: value
        for name, value in dream.files["generation_config.json"].items()
        if name != "_from_model_config"
    }
    chosen = generation | {"alg": "maskgit_plus", "steps": 128, "eps": 0.01}
    folder = PublishedFiles(
        dream.id, "", dict(dream.files) | {"generation_config.json": chosen}, {}
    ).write(tmp_path)
    spec = spec_of(config_of(folder).model_config)
    assert spec is not None
    assert spec.max_denoising_steps == 128
    assert spec.settings == {"algorithm": "maskgit_plus", "eps": 0.01, "alg_temp": 0.0}


def test_a_wrong_value_is_named_as_in_the_file(tmp_path: Path) -> None:
    """A setting under a publisher's name is refused by that name."""
    dream = files_of("Dream-org/Dream-v0-Instruct-7B")
    wrong = {"generation_config.json": {"alg": "best"}}
    folder = PublishedFiles(dream.id, "", dict(dream.files) | wrong, {}).write(tmp_path)
    with pytest.raises(ValueError, match=r"generation_config.json: alg='best'"):
        config_of(folder)


def test_an_autoregressive_nemotron(tmp_path: Path) -> None:
    """A file whose weights were trained token after token is served so, unless a rule is set."""
    files = files_of("nvidia/Nemotron-Labs-Diffusion-8B")
    folder = files.write(tmp_path)
    trained = {"dlm_paradigm": "autoregressive"}
    assert spec_of(config_of(folder, hf_overrides=trained).model_config) is None
    for settings in ({"rule": "reveal"}, {"rules": "all"}):
        config = config_of(folder, hf_overrides=trained, additional_config={"diffusion": settings})
        spec = spec_of(config.model_config)
        assert spec is not None
        assert spec.ways[0].name == "reveal"
    assert spec.ways[spec.default_way].name == "autoregressive"


INDEXED = [one for one in published_files() if INDEX in one.files]


@pytest.mark.parametrize("files", INDEXED, ids=lambda files: files.id)
def test_names_in_the_index(files: PublishedFiles) -> None:
    """The rules of tensors give the number, the bytes and the names in a published index."""
    index = files.files[INDEX]
    shapes = shapes_of(files.config)
    assert len(shapes) == index["tensors"]
    num_bytes = 2 * sum(math.prod(shape) for shape in shapes.values())
    # LLaDA2 keeps the biases of its routers in float32.
    assert num_bytes == pytest.approx(index["total_size"], rel=1e-6)
    patterns = {re.sub(r"(?<=\.)\d+(?=\.)", "N", name) for name in shapes}
    assert patterns >= set(index.get("some_names", ()))
    assert "names" not in index or patterns == set(index["names"])


FIGURES = [row for row in expected() if row.tensors or row.billions]


@pytest.mark.parametrize("row", FIGURES, ids=name_of)
def test_published_figures(row: Expected) -> None:
    """The rules of tensors give the published numbers of tensors and parameters."""
    shapes = shapes_of(row.files.config)
    billions = sum(math.prod(shape) for shape in shapes.values()) / 1e9
    assert row.tensors in (None, len(shapes))
    assert row.billions is None or billions == pytest.approx(row.billions, rel=0, abs=0.01)


def first_layer_of(adapter: dict[str, Any]) -> tuple[dict[str, Module], Any]:
    """Return the modules of a checkpoint of one layer of published width, and its configuration."""
    config = dict(files_of(adapter["base"]).config)
    config |= {name: 1 for name in ("num_hidden_layers", "n_layers") if name in config}
    tensors, made = tensors_of(config)
    return adapted_modules(tensors, made), made


def written(adapter: dict[str, Any], folder: Path, modules: dict[str, Module]) -> Path:
    """Write files as PEFT does, with matrices for each module that ``target_modules`` matches."""
    values = adapter["values"]
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(
        json.dumps(values | {"peft_type": "LORA", "bias": "none"}), encoding="utf-8"
    )
    tensors = {}
    for name, module in modules.items():
        if name.rpartition(".")[2] in values["target_modules"]:
            sizes = {
                "A": (values["r"], module.in_features),
                "B": (module.out_features, values["r"]),
            }
            for half, size in sizes.items():
                tensor = torch.zeros(size, dtype=torch.bfloat16)
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = tensor
    save_file(tensors, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("adapter", adapters(), ids=lambda adapter: adapter["id"])
def test_an_adapter_fits(adapter: dict[str, Any], tmp_path: Path) -> None:
    """The published rank and modules are accepted, and a server for smaller ranks refuses them."""
    modules, _ = first_layer_of(adapter)
    targets = adapter["values"]["target_modules"]
    assert adapter["module"] in modules
    assert set(targets) <= {name.rpartition(".")[2] for name in modules}
    folder = written(adapter, tmp_path / "adapter", modules)
    rank = adapter["values"]["r"]
    assert AdapterSupport(modules, max_rank=rank).check(str(folder)) == folder
    with pytest.raises(ValueError, match="max-lora-rank"):
        AdapterSupport(modules, max_rank=rank // 2).check(str(folder))


def test_nemotron_drafts_with_it(tmp_path: Path) -> None:
    """Nemotron's own adapter is read with its published rank and factor."""
    (adapter,) = [adapter for adapter in adapters() if "linear_spec_lora" in adapter["id"]]
    modules, config = first_layer_of(adapter)
    written(adapter, tmp_path / "linear_spec_lora", modules)
    model: Any = SimpleNamespace(
        model=str(tmp_path), hf_config=config, revision=None, diffusion=DiffusionPlan()
    )
    found = find_draft_lora(model)
    assert found is not None
    assert (found.rank, found.scale) == (128, 4.0)
