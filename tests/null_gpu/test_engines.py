"""Engines start captured and compiled on the CUDA platform, within the driver's baselines.

Nothing of it shows that a value is right, or how fast anything is: kernels do nothing on the null
GPU.
"""

from typing import Any

import pytest

from tests.null_gpu import pass_kernels
from tests.null_gpu.engine_cases import KINDS, PICTURED, WAYS
from tests.support.counters import baselines
from tests.support.families.cases import CASES, WITHOUT_STRATEGY, checkpoint_of
from tests.support.models.checkpoints import SHIPPED

pytestmark = pytest.mark.engine

SERVE = "tests.null_gpu.engine_cases:serve"
# The versions of LLaDA2 before it differ from 2.2 in their rule alone, and SDAR's block of 32 in a
# number: they are rehearsed.
FAMILIES = [name for name in CASES if name not in ("llada2.0", "llada2.1", "sdar-block-32")]
FAMILIES += [*WITHOUT_STRATEGY, "uno", "uno_k2"]
WHOLE_SEQUENCES = ("mdlm", "llada", "llada-moe", "illada", *WITHOUT_STRATEGY)
# A pass of whole sequences, one whose rows arrive as embeddings, for pictures, and one of drafts
# with a LoRA on each layer.
STEADY = ("llada", "mineru", "uno")
# One for each layout but DiffusionGemma's, and the rows that it rounds up to.
LAYOUTS = {"sdar": 4, "llada2.2": 32, "nemotron": 1, "uno": 1, "fast-dllm": 32}
# What their starts have besides a server's defaults.
TINY = {
    # Dynamo, the split of its graph and its captures run; Inductor is left out of the backbone.
    "compilation_config": {"backend": "eager"},
    # The longest that all of these tiny models know.
    "max_model_len": 256,
    # Blocks take a second a million on the host.
    "gpu_memory_utilization": 0.01,
    # Of vLLM's own kernels, which the rehearsal compiles.
    "kernel_config": {"enable_jit_warmup": False},
}
# Of which a steady pass is counted.
COUNTED = ("plain", "top_p", "logprobs")


@pytest.mark.slow
def test_the_cpu_platform_is_refused(null_gpu):
    """A case fails if anything imports the CPU platform."""
    for module in ("vllm.v1.worker.cpu_worker", "vllm_diffusion.cpu.kernels"):
        outcome = null_gpu.run("importlib:import_module", name=module)
        assert (
            outcome.error == f"CpuPlatformImportedError: {module} is imported in a process on a GPU"
        )


def served(
    null_gpu, model, options, kinds=("plain",), graphs="FULL_AND_PIECEWISE", **more
) -> dict[str, Any]:
    """Return the result of ``serve`` with these graphs."""
    outcome = null_gpu.run(SERVE, model=str(model), options=options, kinds=kinds, **more)
    found = outcome.checked()
    assert found["chosen"]["graphs"] == graphs
    return found


def assert_every_row(found, given):
    """Check that every scheduled number of rows was run, also with a graph between two sizes.

    Args:
        found: Result of ``every_number_of_rows``.
        given: Rows that the layout rounds up to: a block where known tokens share it with the
            canvas.
    """
    rows = found["rows"]["PIECEWISE"]
    # A canvas that shares the pass with a short prompt is at least a few rows.
    assert rows[0] <= found["sizes"][0]
    assert set(rows) >= set(range(rows[0], found["most"] + 1, given))
    assert not set(rows) <= set(found["sizes"]), "no pass lay between two captured sizes"


@pytest.mark.parametrize(
    "family",
    # In CI a free canvas is the shipped checkpoint's.
    [pytest.param(name, marks=() if name == "sdar" else pytest.mark.slow) for name in FAMILIES],
)
def test_a_family_starts_captured(null_gpu, tmp_path, family):
    """With a server's defaults, a family is captured and runs prompts of every number of rows."""
    folder, options = checkpoint_of(family, tmp_path)
    found = served(
        null_gpu,
        folder,
        options | TINY,
        # Attention of whole sequences reads how long these are.
        graphs="PIECEWISE" if family in WHOLE_SEQUENCES else "FULL_AND_PIECEWISE",
        steady=["plain"] if family in STEADY else [],
        every_row=family in LAYOUTS,
    )
    if family in STEADY:
        baselines.check(f"a steady pass on the null GPU, {family}", found["steady"])
    if family in LAYOUTS:
        assert_every_row(found["every_row"], LAYOUTS[family])
    assert found["chosen"]["attention"] == ["CanvasAttentionImpl"]
    assert found["chosen"]["checked_kinds"] == found["chosen"]["kinds"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_steady_pass_after_a_picture(null_gpu, tmp_path):
    """Requests with a picture are captured, and a steady pass of theirs asks for no more than one
    without.
    """
    folder, options = checkpoint_of("mineru", tmp_path)
    # FlashAttention-4 asks for what the null GPU has not.
    options |= {"limit_mm_per_prompt": {"image": 1}, "mm_encoder_attn_backend": "TRITON_ATTN"}
    steady = ["plain", PICTURED]
    found = served(null_gpu, folder, options | TINY, [PICTURED], steady=steady)
    assert found["steady"][PICTURED] == found["steady"]["plain"]
    baselines.check("a steady pass on the null GPU, mineru after a picture", found["steady"])


@pytest.mark.timeout(600)
def test_the_shipped_checkpoint_compiled(null_gpu):
    """The shipped checkpoint runs every kind of request compiled and captured, as by default."""
    # A prompt alone fills the largest pass that is tried.
    options = {"max_model_len": 1024}
    found = served(
        null_gpu, SHIPPED, options, list(KINDS), steady=COUNTED, every_row=True, seconds=500
    )
    assert_every_row(found["every_row"], 1)
    # What they show is nothing, where no kernel runs; that they arrive is what is watched.
    assert found["requests"]["watched"]["views"] > 0
    baselines.check("a steady pass on the null GPU, shipped checkpoint", found["steady"])


@pytest.mark.slow
def test_the_other_ways(null_gpu):
    """Single tokens and verified drafts run prompts with every number of rows."""
    # FlashAttention-4 asks for what the null GPU has not, and FlashInfer compiles at its first
    # call.
    stock = {"attention_backend": "TRITON_ATTN"}
    variables = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    counts = {}
    for rule, options in (("autoregressive", stock), ("linear_spec", {})):
        options |= TINY | {"additional_config": {"diffusion": {"rule": rule}}}
        every_row = rule == "linear_spec"
        found = served(
            null_gpu,
            SHIPPED,
            options,
            steady=["plain"],
            every_row=every_row,
            variables=variables,
        )
        counts[rule] = found["steady"]["plain"]
    assert_every_row(found["every_row"], 1)
    assert found["chosen"]["attention"] == ["CanvasAttentionImpl"]
    baselines.check("a steady pass on the null GPU, shipped checkpoint in other ways", counts)


@pytest.mark.slow
def test_a_way_for_each_request(null_gpu):
    """Requests of three ways run in one pass and alone, within the driver's baselines.

    A pass of whole canvases is one graph of the layers, whatever its ways; one of single tokens has
    fewer rows.
    """
    ways = ["entropy_bound", "linear_spec", "autoregressive"]
    counts = {}
    for settings, steady in (
        ({}, ["plain"]),
        ({"rules": ways}, ["plain", "drafted", "causal", "mixed"]),
    ):
        options = TINY | {"additional_config": {"diffusion": settings}}
        kinds = ["plain", *WAYS] if settings else ["plain"]
        found = served(null_gpu, SHIPPED, options, kinds, steady=steady, seconds=600)
        named = "" if settings else "the only way: "
        counts |= {named + kind: found["steady"][kind] for kind in steady}
    baselines.check("a steady pass on the null GPU, a way for each request", counts)


@pytest.mark.slow
def test_a_steady_pass_of_the_published_shape(null_gpu, tmp_path):
    """A pass of six layers of the 26B shape stays within the driver's baselines."""
    model = pass_kernels.write_six_layers(tmp_path / "26b", "bf16")
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.9,
        "compilation_config": {"backend": "eager"},
    }
    steady = (*COUNTED, "read", "held read")
    found = served(null_gpu, model, options, steady=steady)
    baselines.check("a steady pass on the null GPU, six layers of the 26B shape", found["steady"])


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_the_kernels_of_a_pass(null_gpu, tmp_path):
    """Each part of a steady FP8 pass launches the recorded kernels by name."""
    launches = pass_kernels.trace(null_gpu, tmp_path / "26b", num_canvases=1)
    rows = {kernel: {"launches": number} for kernel, number in launches.items()}
    baselines.check("kernels of a steady pass, six layers of the 26B shape in FP8", rows)
