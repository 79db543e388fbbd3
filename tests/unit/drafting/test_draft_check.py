"""Unknown settings, and a draft that does not fit, are refused before anything is loaded."""

import copy
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.support.engines.stock import run_in_stock
from tests.support.engines.vllm_configs import vllm_config
from vllm_diffusion.checkpoints import shipped_checkpoint, shipped_draft
from vllm_diffusion.cpu.platform import check_cache
from vllm_diffusion.drafting.cpu_kernels.cpu_check import check_drafts
from vllm_diffusion.drafting.draft_check import (
    ARCHITECTURE,
    SCHEDULER,
    STOCK_ARCHITECTURE,
    check_draft,
)
from vllm_diffusion.drafting.draft_settings import DraftSettings, draft_settings
from vllm_diffusion.drafting.recording import Ring
from vllm_diffusion.drafting.reference_draft import reach_of_layer
from vllm_diffusion.drafting.swap.new_draft import check_new_draft

pytestmark = pytest.mark.engine

TARGET = shipped_checkpoint("qwen3")
SPECULATION = {"method": "dflash", "model": str(shipped_draft()), "num_speculative_tokens": 7}
MASK = 4


def configured(
    drafting: Any = None, num_drafts: int = 7, method: str = "dflash", **changes: Any
) -> Any:
    """Return vLLM's configuration of a draft with ``changes`` in its ``config.json``."""
    config = vllm_config(TARGET, speculative_config=dict(SPECULATION))
    config.additional_config = {} if drafting is None else {"drafting": drafting}
    spec = config.speculative_config
    spec.method, spec.num_speculative_tokens = method, num_drafts
    draft = spec.draft_model_config
    vars(draft.hf_config).update({"architectures": [ARCHITECTURE]} | copy.deepcopy(changes))
    draft.model_arch_config.architectures = draft.hf_config.architectures
    return config


@pytest.mark.parametrize(
    ("text", "found"), [("<mask>", MASK), ("two words", [3, 4]), (7, []), ("no tokenizer", None)]
)
@pytest.mark.parametrize("architecture", [ARCHITECTURE, STOCK_ARCHITECTURE])
def test_mask_token_as_text(
    text: Any, found: Any, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's tokenizer gives the id of a mask token that is a text, with vLLM's class too,
    and a text that is not one token is refused by name.
    """
    ids = [found] if isinstance(found, int) else found
    # Without the special tokens that a tokenizer may add to each text.
    encode = {(text, False): ids}
    tokenizer = SimpleNamespace(
        encode=lambda text, add_special_tokens: encode[text, add_special_tokens]
    )
    monkeypatch.setattr(
        "vllm.tokenizers.registry.cached_tokenizer_from_config",
        lambda target: None if ids is None else tokenizer,
    )
    by_text = {"mask_token": text, "target_layer_ids": [0, 1]}
    config = configured(architectures=[architecture], dflash_config=by_text)
    draft = config.speculative_config.draft_model_config.hf_config
    if found != MASK:
        with pytest.raises(ValueError, match=r"draft .*: dflash_config.mask_token=.* must be one"):
            check_draft(config)
        return
    check_draft(config)
    assert draft.dflash_config["mask_token_id"] == MASK
    # An id says more than a text does.
    draft.dflash_config = by_text | {"mask_token_id": 5}
    check_draft(config)
    assert draft.dflash_config["mask_token_id"] == 5


def dflash(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1, 2]} | changes}


STOCK = {"architectures": [STOCK_ARCHITECTURE]}
STAGES = {"pipeline_parallel_size": 2, "async_scheduling": True}
GEMMA = {"model_type": "gemma4_text"}
# What is refused of a draft that vLLM's own class serves, and what vLLM does with it alone: as
# `stock` in tests/integration/refused.toml.
REFUSED_OF_STOCK: list[tuple[dict[str, Any], str, str]] = [
    ({"vocab_size": 99}, "vocab_size=99 is not the target's 320", "answers: as a draft for the tokens of another model"),
    ({"hidden_size": 32}, "hidden_size=32 is not the target's 128", "load"),
    ({"target_hidden_size": 32}, "target_hidden_size=32 is not the target's 128", "load"),
    (dflash(mask_token_id=320), "mask_token_id=320 must be a token .* 0 to 319", "request"),
    (dflash(mask_token_id=None), "dflash_config.mask_token_id=None must be a token", "load"),
    (dflash(target_layer_ids=[]), r"target_layer_ids=\[\] must list", "request"),
    (dflash(target_layer_ids=[0, 1, 4]), r"target_layer_ids=\[0, 1, 4\] must .* 0 to 3", "request"),
    ({"dflash_config": None}, "dflash_config.target_layer_ids=None must list .* 0 to 3", "load"),
    ({"dflash_config": {"mask_token_id": MASK}}, "target_layer_ids=None must list", "request"),
    (dflash(target_layer_ids="0"), "target_layer_ids='0' must list", "load"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, r"eagle_aux_hidden_state_layer_ids=\[1, 2, 5\] must .* 0 to 4", "request"),
    ({"dflash_config": {"layer_ids": [1, 2, 9]}, "mask_token_id": MASK}, r"dflash_config.layer_ids=\[1, 2, 9\] must", "request"),
    ({"dflash_config": {"target_layer_ids": [0, 1, 2]}, "pard_token": 999}, "pard_token=999 must be a token", "request"),
    (dflash(use_aux_hidden_state=False), "use_aux_hidden_state=false, but", "request"),
    ({"dflash_config": [1]}, r"dflash_config=\[1\] must be an object", "load"),
    ({"eagle_config": "x"}, "eagle_config='x' must be an object", "load"),
    (dflash(causal="false"), "dflash_config.causal='false' must be true or false", "answers: as a causal draft, with fewer accepted"),
    ({"is_neox_style": "no"}, "is_neox_style='no' must be true or false", "request"),
    (dflash(use_swa="no", swa_window_size=8), "dflash_config.use_swa='no' must be true or false", "answers: in windows, with fewer accepted"),
    (dflash(use_swa=True), "sliding_window=None must be the number of tokens", "load"),
    (dflash(use_swa=True, swa_window_size=-1), "dflash_config.swa_window_size=-1 must be an integer of at least 1", "request"),
    (dflash(sample_from_anchor=True), "sample_from_anchor=True must be false", "load"),
    (dflash(projector_type="domino"), "projector_type='domino' must be left out", "answers: without the head that corrects its tokens"),
    (dflash(attention_value_scale="1"), "attention_value_scale='1' must be a number", "request"),
    ({"logit_scale": "1"}, "logit_scale='1' must be a number", "request"),
    ({"draft_vocab_size": 0}, "draft_vocab_size=0 must be an integer", "answers: with fewer accepted, none"),
    ({"layer_types": ["full_attention"]}, r"layer_types=\['full_attention'\] must be a list .* each of 3 layers", "start"),
    ({"layer_types": ["chunked_attention"] * 3}, "layer_types=.* must be a list of full_attention or sliding_attention", "answers: as full attention"),
    ({"layer_types": ["sliding_attention"] * 3}, "sliding_window=None must be", "load"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Of either class.
        *((changes, message) for changes, message, _ in REFUSED_OF_STOCK[:6]),
        ({"draft_vocab_size": 99}, "draft_vocab_size=99 is not the target's 320"),
        ({"num_target_layers": 5}, "num_target_layers=5 is not the target's 4, "),
        (dflash(target_layer_ids=[0, 3]), r"target_layer_ids=\[0, 3\] must .* 0 to 2"),
        (dflash(target_layer_ids=[True]), r"target_layer_ids=\[True\] must list"),
        ({"dflash_config": None}, "target_layer_ids=None must list"),
        (
            {"drafting": {"steps": 8}},
            r"^--additional-config .*drafting.*steps=8 .*set steps to 1\.\.7",
        ),
        (
            {"drafting": {"window": 8}, "layer_types": ["full_attention", "sliding_attention"]},
            r"window=8 cannot be set .* \(full_attention, sliding_attention\)",
        ),
        ({"drafting": {}, "method": "eagle3"}, "the draft of --speculative-config is none"),
        ({"drafting": {}, "architectures": ["DFlash2DraftModel"]}, "is DFlash2DraftModel: leave"),
        *((STOCK | changes, message) for changes, message, _ in REFUSED_OF_STOCK),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    """A draft that does not fit its target is refused with the reason."""
    with pytest.raises(ValueError, match=message):
        check_draft(configured(**changes))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_refused_in_stock(tmp_path: Path) -> None:
    """Each draft that is refused would end vLLM's engine later, without the file's name, or would
    not be a draft of its target.
    """
    jobs = []
    for i, (changes, _, _) in enumerate([({}, "", ""), *REFUSED_OF_STOCK]):
        draft = shutil.copytree(shipped_draft(), tmp_path / str(i))
        config = json.loads((draft / "config.json").read_text())
        (draft / "config.json").write_text(json.dumps(config | changes))
        jobs.append(
            {"model": str(TARGET), "speculative_config": SPECULATION | {"model": str(draft)}}
        )
    good, *outcomes = run_in_stock(jobs)
    assert good["accepted"] > 0
    for (changes, _, stock), outcome in zip(REFUSED_OF_STOCK, outcomes, strict=True):
        stage, _, wrong = stock.partition(": ")
        assert outcome.get("stage", "answers") == stage, (changes, outcome)
        assert "config.json" not in outcome.get("error", ""), (changes, outcome)
        if stage == "answers":
            # The target decides; what a misread draft costs is time.
            assert outcome["tokens"] == good["tokens"], (changes, outcome)
            is_less = outcome["accepted"] < good["accepted"]
            assert is_less == ("fewer accepted" in wrong), (changes, outcome)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": 0, "block_size": "8"},
        {"draft_vocab_size": 99},
        {"hidden_size": 32, "target_hidden_size": 128},
        {"num_target_layers": 9},
        dflash(target_layer_ids=[0, 3]),
        dflash(use_aux_hidden_state=False, target_layer_ids=[1]),
        dflash(causal=None, use_swa=True, swa_window_size=8, attention_value_scale=2),
        {"eagle_aux_hidden_state_layer_ids": [0, 4], "is_causal": False, "is_neox_style": None},
        {"dflash_config": {"layer_ids": [1, 2]}, "mask_token_id": MASK},
    ],
)
def test_what_stock_knows_is_left_to_it(changes: dict[str, Any]) -> None:
    """The configuration of a draft that vLLM's own class serves is not changed."""
    served = configured(**STOCK, **changes)
    draft = served.speculative_config.draft_model_config.hf_config
    untouched = copy.deepcopy(vars(draft))
    check_draft(served)
    assert vars(draft) == untouched


@pytest.mark.parametrize(
    "architecture",
    [ARCHITECTURE, STOCK_ARCHITECTURE, "DFlash2DraftModel", "Qwen3DFlash2DraftModel"],
)
@pytest.mark.parametrize("num_drafts", [7, 8])
@pytest.mark.parametrize(
    ("top", "nested"), [(8, None), (8, 8), (None, 8), (16, 8), (8, 16)], ids=str
)
def test_more_drafts_than_it_was_trained_for(
    top: int | None, nested: int | None, num_drafts: int, architecture: str
) -> None:
    """More drafts than a block holds are verified like others; a warning names how many fit.

    Turbo-dLLM and NeMo write a block's length next to ``dflash_config`` and in it; the shorter one
    bounds a draft.
    """
    fields = dflash() if nested is None else dflash(block_size=nested)
    config = configured(
        num_drafts=num_drafts, architectures=[architecture], block_size=top, **fields
    )
    with mock.patch("vllm_diffusion.drafting.draft_check.logger.warning") as warning:
        check_draft(config)
    lines = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    assert ["a block of 8" in line and line.endswith("to 7.") for line in lines] == [True] * (
        num_drafts - 7
    )


@pytest.mark.parametrize(
    ("name", "drafting", "architecture"),
    [
        ("Qwen3DFlashDraftModel", None, STOCK_ARCHITECTURE),
        ("DFlashQwen3DFlashDraftModel", None, STOCK_ARCHITECTURE),
        ("DFlashQwen3DFlash2DraftModel", None, "DFlash2DraftModel"),
        # With a setting it is ours.
        ("Qwen3DFlashDraftModel", {"steps": 2}, ARCHITECTURE),
        ("DFlashQwen3DFlashDraftModel", {"steps": 2}, ARCHITECTURE),
    ],
)
@pytest.mark.parametrize("causal", [None, True])
def test_drafts_of_nemo(name: str, drafting: Any, architecture: str, causal: bool | None) -> None:
    """A draft under NeMo's names is served as vLLM's or ours, and a causal one (JetSpec's) is
    causal.
    """
    fields = {} if causal is None else {"causal": causal}
    served = configured(drafting, architectures=[name], is_causal=False, **dflash(**fields))
    check_draft(served)
    draft = served.speculative_config.draft_model_config
    assert draft.architectures == draft.hf_config.architectures == [architecture]
    if architecture == STOCK_ARCHITECTURE:
        assert draft.hf_config.is_causal is bool(causal)


@pytest.mark.parametrize("non_causal", [False, True])
def test_drafts_of_speculators(non_causal: bool, tmp_path: Path) -> None:
    """Full attention of a draft that ``speculators`` saved sees the whole block, its sliding layers
    as much of it as the file says, and a running server takes such a draft too.
    """
    draft = shutil.copytree(shipped_draft(), tmp_path / "draft")
    layers = json.loads((draft / "config.json").read_text())
    options = layers.pop("dflash_config")
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    window = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 32}
    config = {
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash"},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in options["target_layer_ids"]],
        "mask_token_id": options["mask_token_id"],
        "block_size": layers.pop("block_size"),
        "transformer_layer_config": layers | window,
        "sliding_window_non_causal": non_causal,
    }
    (draft / "config.json").write_text(json.dumps(config))
    served = vllm_config(TARGET, speculative_config=SPECULATION | {"model": str(draft)})
    read = served.speculative_config.draft_model_config.hf_config
    reach = [(32, not non_causal), (None, False), (None, False)]
    assert [reach_of_layer(read, layer) for layer in range(3)] == reach
    assert len(check_new_draft(draft, served)) == len(load_file(draft / "model.safetensors"))


def test_settings_without_a_draft_are_refused() -> None:
    """Settings of drafts are refused where no draft is configured, since nothing would read
    them.
    """
    config = configured({"steps": 2})
    config.speculative_config = None
    with pytest.raises(ValueError, match="the draft of --speculative-config is none: leave"):
        check_draft(config)
    config.additional_config = {}
    check_draft(config)


def test_what_is_chosen() -> None:
    """A draft of vLLM's architecture is served by this package's class where a setting is given,
    and a window holds for every layer.
    """
    served = configured({"window": 48}, **STOCK, **dflash())
    check_draft(served)
    model_config = served.speculative_config.draft_model_config
    assert model_config.architectures == [ARCHITECTURE]
    expected = dflash(use_swa=True, swa_window_size=48)["dflash_config"]
    assert model_config.hf_config.dflash_config == expected


@pytest.mark.parametrize("dtype", ["turboquant_k8v4", "nvfp4", "fp8_e5m2"])
def test_caches_that_the_cpu_cannot_read(dtype: str) -> None:
    """A KV cache type that the CPU cannot read is refused for the target, and for a draft that has
    a type of its own, before a worker starts.
    """
    config = configured()
    config.cache_config.cache_dtype = "fp8"
    check_cache(config)
    config.speculative_config.kv_cache_dtype = dtype
    with pytest.raises(ValueError, match=f"^--speculative-config: kv_cache_dtype {dtype} is not"):
        check_cache(config)
    config.speculative_config = None
    check_cache(config)
    config.cache_config.cache_dtype = dtype
    with pytest.raises(ValueError, match=f"^--kv-cache-dtype {dtype} is not .* or fp8 or"):
        check_cache(config)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("dflash", {}, None),
        ("dflash", {"watermark_config": object()}, "--watermark-config with --speculative-config"),
        ("dflash", {"rejection_sample_method": "fly"}, 'rejection_sample_method "fly"'),
        ("draft_model", {}, None),
        # A server with it would die of its first request.
        ("draft_model", STAGES, "draft_model into stages .* --pipeline-parallel-size out"),
        # vLLM's synchronous scheduler does not know the drafts of stages in time.
        ("dflash", STAGES | {"async_scheduling": False}, "leave --no-async-scheduling out"),
        ("dflash", STAGES, None),
        # vLLM's class hands no hidden states on, which some drafts read.
        ("dflash", STAGES | GEMMA, r"dflash reads hidden .* --pipeline-parallel-size out"),
        ("eagle3", STAGES | GEMMA, r"eagle3 reads hidden .* --pipeline-parallel-size out"),
        ("ngram", STAGES | GEMMA, None),
        ("dflash", GEMMA, None),
    ],
)
def test_what_the_cpu_verifies(method: str, changes: dict[str, Any], message: str | None) -> None:
    """The CPU refuses methods of drafting that it cannot verify, and checks nothing without a
    draft.
    """
    config = configured(method=method)
    for part in (
        config,
        config.speculative_config,
        config.parallel_config,
        config.scheduler_config,
        config.model_config.hf_text_config,
    ):
        vars(part).update({name: changes[name] for name in changes if hasattr(part, name)})
    if message is not None:
        with pytest.raises(ValueError, match=message):
            check_drafts(config)
        config.speculative_config = None
    check_drafts(config)


ADAPTIVE = {"drafting": {"adaptive": True}}


def recording(folder: Any, **changes: Any) -> Any:
    """Return vLLM's configuration of a target whose traffic is recorded."""
    config = configured({"record": {"folder": str(folder)}}, architectures=["DFlash2DraftModel"])
    vars(config).update(changes)
    return config


def test_recording_goes_with_any_draft_and_none(tmp_path: Path) -> None:
    """A recording selects this package's scheduler with any draft and without one, and a second
    check, as vLLM makes one for the draft's own configuration, passes although the folder is
    locked.
    """
    for changes in ({}, {"speculative_config": None}):
        config = recording(tmp_path / "recording", **changes)
        check_draft(config)
        assert config.scheduler_config.scheduler_cls == SCHEDULER
        held = Ring(tmp_path / "recording", "engine0", 1).lock()
        check_draft(config)
        os.close(held)


def test_adaptive_drafts_are_off_in_data_parallelism(tmp_path: Path) -> None:
    """With data parallelism adaptive drafting is turned off, and the recording stays on."""
    record = {"folder": str(tmp_path / "recording")}
    config = recording(
        tmp_path, additional_config={"drafting": {"record": record, "adaptive": True}}
    )
    config.parallel_config.data_parallel_size = 2
    check_draft(config)
    assert config.additional_config == {"drafting": {"record": record, "adaptive": False}}
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    config.additional_config, config.scheduler_config.scheduler_cls = ADAPTIVE, None
    check_draft(config)
    assert config.scheduler_config.scheduler_cls is None


@given(num_drafts=st.integers(1, 40), max_num_seqs=st.integers(2, 300))
def test_graphs_are_captured_for_adaptive_drafts(num_drafts: int, max_num_seqs: int) -> None:
    """The numbers of drafts for which vLLM captures graphs are those that adaptive drafting chooses
    from, 0 included, and an operator's own table is kept.
    """
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    config = configured(num_drafts=num_drafts, architectures=[STOCK_ARCHITECTURE], block_size=None)
    spec = config.speculative_config
    config.additional_config = ADAPTIVE
    config.scheduler_config.max_num_seqs = max_num_seqs
    check_draft(config)
    table = spec.num_speculative_tokens_per_batch_size
    captured = set(build_dynamic_sd_schedule_lookup(table, max_num_seqs, num_drafts)[1:])
    assert captured == {level for *_, level in table}
    assert {0, num_drafts} <= captured <= {0, *(num_drafts >> halvings for halvings in range(6))}
    # The operator's own table stays.
    spec.num_speculative_tokens_per_batch_size = theirs = [(1, 4, num_drafts), (5, 8, 0)]
    config.scheduler_config.scheduler_cls = None
    check_draft(config)
    assert spec.num_speculative_tokens_per_batch_size == theirs


PASSES = {"steps": 3, "schedule": "linear", "order": "position", "window": 64}


@pytest.mark.parametrize(
    ("additional", "read", "counts"),
    [
        *(
            (nothing, {"steps": 1, "window": None}, (7,))
            for nothing in ({}, {"diffusion": {}}, None)
        ),
        ({"drafting": PASSES}, PASSES, (2, 3, 2)),
    ],
)
def test_settings_are_read(additional: Any, read: dict[str, Any], counts: tuple[int, ...]) -> None:
    """Settings of drafting spread a block over their steps; without any a draft takes one pass."""
    config = configured()
    config.additional_config = additional
    settings = draft_settings(config)
    assert settings == DraftSettings(**read)
    assert settings.unmask_counts(7) == counts


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ([], r"drafting must be a mapping; got \[\]"),
        ({"passes": 2}, "'passes' is not a setting of drafts; these are steps, schedule, order"),
        ({"steps": 0}, "steps=0 must be an integer of at least 1"),
        ({"steps": True}, "steps=True must be an integer"),
        ({"window": 0}, "window=0 must be an integer of at least 1"),
        ({"window": 1.5}, "window=1.5 must be an integer"),
        (
            {"order": "random"},
            'order=\'random\' is not known; set it to "confidence" or "position"',
        ),
        ({"schedule": {}}, 'schedule={} is not known; set it to "cosine" or "linear" or "sqrt"'),
        ({"reveals": "sampled"}, 'reveals="sampled" is not served: .* leave reveals out'),
        ({"record": "here"}, "record='here' must be a mapping"),
        ({"record": {"max_mib": 3}}, 'must be a mapping with "folder"'),
        (
            {"record": {"folder": "r", "max_gib": 3}},
            "record has no setting 'max_gib'; it has folder, max_mib",
        ),
        ({"record": {"folder": 3}}, "record.folder=3 must be the path of a folder"),
        ({"record": {"folder": ""}}, "record.folder='' must be the path"),
        ({"record": {"folder": "r", "max_mib": 0}}, "record.max_mib=0 must be an integer"),
        ({"record": {"folder": "r", "max_mib": True}}, "record.max_mib=True must be"),
        ({"reveals": "greedy"}, "reveals='greedy' is not known; set it to \"likeliest\""),
    ],
)
def test_what_is_not_understood_is_refused(section: Any, message: str) -> None:
    """A wrong setting of drafting is refused with the option's name and the reason."""
    with pytest.raises(ValueError, match=rf"^--additional-config .*{message}"):
        draft_settings(configured(section))
