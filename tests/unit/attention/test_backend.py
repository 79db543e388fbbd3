"""The attention back end as vLLM sees it: what it accepts, writes to the cache and reads back."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from attention_kernels.canvas_attention import (
    AttentionOptions,
    PagedCache,
    Sequences,
    canvas_attention,
)
from tests.support.engines.vllm_configs import replan, vllm_config
from vllm_diffusion.attention.backend import CanvasAttentionBackend, CanvasAttentionImpl
from vllm_diffusion.attention.cache_writes import (
    reshape_and_cache_flash,
    split_kv_cache,
    triton_reshape_and_cache_flash,
)
from vllm_diffusion.attention.metadata import (
    CanvasAttentionMetadata,
    CanvasAttentionMetadataBuilder,
)
from vllm_diffusion.startup.attention import choose_attention, register_attention
from vllm_diffusion.startup.plugin_settings import PluginSettings

BLOCK_SIZE, NUM_BLOCKS = 16, 8
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 32


def reasons_against(**changes):
    """Return the reasons for which vLLM refuses the back end on a layer of DiffusionGemma-26B."""
    layer = {
        "head_size": 512,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": True,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
        "has_sliding_window": True,
        "use_non_causal": True,
        # VLLM_BATCH_INVARIANT, where keys stay uncut.
        "use_batch_invariant": True,
    }
    return CanvasAttentionBackend.validate_configuration(**(layer | changes))


@pytest.mark.parametrize("head_size", [256, 512])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_vllm_accepts_it_for_every_layer_of_the_big_model(head_size, kv_cache_dtype, capability):
    """vLLM finds no reason against the back end for any layer of the 26B model."""
    reasons = reasons_against(
        head_size=head_size,
        kv_cache_dtype=kv_cache_dtype,
        device_capability=DeviceCapability(*capability),
    )
    assert reasons == []


@pytest.mark.parametrize(
    "changes",
    [
        {"device_capability": DeviceCapability(7, 5)},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"has_sink": True},
        {"attn_type": "encoder"},
    ],
    ids=str,
)
def test_vllm_refuses_it_for_what_it_cannot_do(changes):
    """vLLM names one reason for each property that the back end does not support."""
    assert len(reasons_against(**changes)) == 1


def configured(attention="auto", may_hold_images=False):
    config = vllm_config()
    replan(config, settings=PluginSettings(attention=attention))
    config.model_config.is_mm_prefix_lm = may_hold_images
    return config


@pytest.mark.parametrize(
    ("attention", "may_hold_images", "support"),
    [
        *((name, False, AttentionCGSupport.ALWAYS) for name in ("auto", "triton", "cute")),
        # Only batches without prompts.
        ("auto", True, AttentionCGSupport.UNIFORM_BATCH),
        *(("reference", has_images, AttentionCGSupport.NEVER) for has_images in (False, True)),
    ],
)
def test_passes_that_are_captured(attention, may_hold_images, support):
    """Batches with prompts are captured only if the model has no images, and the reference, which
    reads the batch on the host, never is.
    """
    config = configured(attention, may_hold_images)
    assert CanvasAttentionMetadataBuilder.get_cudagraph_support(config, None) == support


def make_impl(
    kv_cache_dtype="auto", attention="auto", head_size=HEAD_SIZE, window=None, has_images=False
):
    with set_current_vllm_config(configured(attention, has_images)):
        return CanvasAttentionImpl(
            NUM_HEADS,
            head_size,
            0.25,
            NUM_KV_HEADS,
            sliding_window=window,
            kv_cache_dtype=kv_cache_dtype,
        )


def make_cache(dtype):
    shape = (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    return torch.zeros(shape, dtype=torch.uint8 if dtype == torch.float8_e4m3fn else dtype)


def layer_with_scales(key_scale=1.0, value_scale=1.0):
    return SimpleNamespace(_k_scale=torch.tensor(key_scale), _v_scale=torch.tensor(value_scale))


def test_padding_is_not_written():
    """A padded row, whose slot is -1, is not written to the cache."""
    torch.manual_seed(0)
    impl, cache = make_impl(), make_cache(torch.float32)
    new = torch.randn(3, NUM_KV_HEADS, HEAD_SIZE)
    slots = torch.tensor([BLOCK_SIZE + 3, -1, 2 * BLOCK_SIZE])
    impl.do_kv_cache_update(layer_with_scales(), new, new + 1, cache, slots)
    keys, values = split_kv_cache(cache)
    assert torch.equal(keys[1, 3], new[0])
    assert torch.equal(values[1, 3], new[0] + 1)
    assert torch.equal(keys[2, 0], new[2])
    assert cache.count_nonzero() == 2 * 2 * NUM_KV_HEADS * HEAD_SIZE


@pytest.mark.parametrize("attention", ["reference", "triton"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_layer_reads_what_it_wrote(kv_cache_dtype, attention):
    """A prompt of 20 rows and a canvas of 8 rows on 5 keys match the kernel's fp64 reference."""
    torch.manual_seed(0)
    impl = make_impl(kv_cache_dtype, attention)
    is_fp8 = kv_cache_dtype == "fp8"
    cache = make_cache(torch.float8_e4m3fn if is_fp8 else torch.float32)
    layer = layer_with_scales(0.01, 0.02) if is_fp8 else layer_with_scales()
    lengths, num_rows = [20, 13], 28
    block_table = torch.tensor([[1, 2], [5, 0]], dtype=torch.int32)
    positions = [(0, p) for p in range(20)] + [(1, p) for p in range(5)]
    positions += [(1, p) for p in range(5, 13)]
    slots = torch.tensor(
        [int(block_table[i, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for i, p in positions]
    )
    keys = torch.randn(33, NUM_KV_HEADS, HEAD_SIZE)
    values = torch.randn_like(keys)
    impl.do_kv_cache_update(layer, keys, values, cache, slots)
    query = torch.randn(num_rows, NUM_HEADS, HEAD_SIZE)
    metadata = CanvasAttentionMetadata(
        Sequences(
            block_table,
            torch.tensor([0, 20, 28], dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor([20, 0], dtype=torch.int32),
            max_query_len=20,
            max_seq_len=20,
        ),
        num_tokens=num_rows,
        window_anchor="canvas",
    )
    out = torch.empty(num_rows, NUM_HEADS * HEAD_SIZE)
    impl.forward(layer, query, keys[:num_rows], values[:num_rows], cache, metadata, out)

    expected_cache = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE).double()
    flat = expected_cache.flatten(1, 2)
    flat[0, slots], flat[1, slots] = keys.double(), values.double()
    expected = canvas_attention(
        query.double(),
        PagedCache(*expected_cache),
        metadata.sequences,
        AttentionOptions(0.25),
        impl="reference",
    )
    error = (out.view_as(expected) - expected).abs().max().item()
    # E4M3 keeps three bits after the leading one: 6 % of a value of up to 4.
    assert error < (0.25 if is_fp8 else 1e-5)
    assert (error > 1e-3) == is_fp8


def test_values_beyond_the_range_of_fp8_saturate():
    """Keys and values beyond the range of FP8 are stored as its largest number."""
    impl, cache = make_impl("fp8"), make_cache(torch.float8_e4m3fn)
    new = torch.full((1, NUM_KV_HEADS, HEAD_SIZE), 1e4)
    impl.do_kv_cache_update(layer_with_scales(), new, -new, cache, torch.tensor([0]))
    keys, values = split_kv_cache(cache.view(torch.float8_e4m3fn))
    assert keys[0, 0].float().unique().tolist() == [448.0]
    assert values[0, 0].float().unique().tolist() == [-448.0]


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Make the code that chooses the back end believe that there is a GPU."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)


def choose(backend=None, attention="auto"):
    config = configured(attention)
    config.attention_config.backend = AttentionBackendEnum[backend] if backend else None
    register_attention()
    return choose_attention(config.attention_config.backend, attention).name


@pytest.mark.usefixtures("on_a_gpu")
def test_ours_is_the_default_on_a_gpu_and_stock_s_can_be_chosen(vllm_log):
    """A GPU runs our back end by default, and vLLM's own with a warning if it is named."""
    assert choose() == "CUSTOM"
    assert AttentionBackendEnum.CUSTOM.get_class() is CanvasAttentionBackend
    assert not vllm_log.records
    for name in ("TRITON_ATTN", "FLASH_ATTN"):
        assert choose(name) == name
        # Whatever runs it, the name keeps its meaning: peers are measured with it.
        assert "vllm_diffusion" not in AttentionBackendEnum[name].get_path()
        assert f"{name} differs from the reference" in vllm_log.text


@pytest.mark.usefixtures("on_a_gpu")
def test_what_contradicts_itself_or_cannot_serve_a_canvas_is_refused():
    """Contradicting options and a back end that cannot serve canvases are refused."""
    with pytest.raises(ValueError, match="FLASH_ATTN runs vLLM's own kernels.*attention"):
        choose("FLASH_ATTN", attention="triton")
    with pytest.raises(ValueError, match="FLASHINFER cannot serve.*CUSTOM or TRITON_ATTN or FLASH"):
        choose("FLASHINFER")


@pytest.fixture
def capability(request, on_a_gpu, monkeypatch):
    """Return the compute capability of the simulated GPU."""
    from vllm.platforms import current_platform

    found = DeviceCapability(*request.param)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: found)
    return found


@pytest.mark.parametrize(
    ("capability", "kv_cache_dtype", "is_compiled"),
    [((8, 6), "fp8", True), ((8, 9), "fp8", False), ((8, 6), "auto", False)],
    indirect=["capability"],
)
@pytest.mark.usefixtures("capability")
def test_a_gpu_without_fp8_in_triton(kv_cache_dtype, is_compiled):
    """An FP8 cache is refused on a GPU where vLLM's Triton kernel would fail after loading."""
    writer = reshape_and_cache_flash if is_compiled else triton_reshape_and_cache_flash
    assert make_impl(kv_cache_dtype).write_cache is writer


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)], indirect=True)
def test_flash_attention_4_is_refused_where_it_has_no_kernel(capability):
    """FlashAttention 4 is refused on a GPU that it has no kernel for."""
    with pytest.raises(ValueError, match=r"compute capability 9.x or 10.x; set attention to"):
        choose(attention="cute")


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], indirect=True)
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("has_images", [False, True])
def test_layers_that_flash_attention_4_cannot_run_are_triton_s(
    capability, cache_dtype, has_images, vllm_log
):
    """Layers that FlashAttention 4 cannot run use Triton, and a log line names them."""
    assert choose(attention="cute") == "CUSTOM"
    # Logged once in a process otherwise.
    with mock.patch("vllm_diffusion.attention.backend.logger.info_once") as said:
        impls = {
            size: make_impl(cache_dtype, "cute", size, has_images=has_images) for size in (256, 512)
        }
    messages = [call.args[0] % call.args[1:] for call in said.call_args_list]
    # Blackwell's tensor memory has no room for the wide heads of the full-attention layers.
    runs = [] if cache_dtype == "fp8" else [256] if capability.major == 10 else [256, 512]
    assert {size: impl.impl for size, impl in impls.items()} == {
        size: "cute" if size in runs else "triton" for size in impls
    }
    wanted = [f"Layers of head size {size} run Triton" for size in impls if size not in runs]
    if has_images:
        wanted += [
            f"Passes with an image run Triton in layers of head size {size}" for size in runs
        ]
    assert sorted(message.partition(":")[0] for message in messages) == sorted(wanted)


@pytest.mark.parametrize("capability", [(9, 0)], indirect=True)
def test_a_pass_with_an_image_runs_triton_where_others_run_flash_attention_4(capability):
    """A pass with an image runs Triton, and one without runs FlashAttention 4."""
    impl = make_impl(attention="cute", head_size=256)
    cache = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 512)
    query = torch.randn(4, NUM_HEADS, 256)
    spans = torch.tensor([[0, 4]] * 4, dtype=torch.int32)
    for row_spans, runs in ((None, "cute"), (spans, "triton")):
        metadata = one_request(row_spans)
        with mock.patch("vllm_diffusion.attention.backend.plan_canvas_attention") as plan:
            impl.forward(None, query, query, query, cache, metadata, torch.empty_like(query))
        assert plan.call_args.kwargs["impl"] == runs


@pytest.mark.parametrize("capability", [(9, 0)], indirect=True)
def test_a_start_compiles_flash_attention_4_and_triton_for_images(capability):
    """A start compiles FlashAttention 4 for text and Triton for images."""
    impl = make_impl(attention="cute", head_size=256)
    layer = SimpleNamespace(kv_cache=torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 512))
    for with_spans, expected in (
        ([False], {"cute": [False]}),
        ([True], {"triton": [True]}),
        ([False, True], {"cute": [False], "triton": [True]}),
    ):
        with mock.patch("vllm_diffusion.attention.backend.warm_up_canvas_attention") as compiled:
            impl.warm_up(layer, "canvas", with_spans, torch.bfloat16)
        asked = [call.kwargs for call in compiled.call_args_list]
        assert {given["impl"]: given["with_spans"] for given in asked} == expected


def one_request(row_spans=None, rows=4, causal=0):
    """Return the metadata of a step of one request on the first cache blocks."""
    return CanvasAttentionMetadata(
        Sequences(
            torch.arange(NUM_BLOCKS, dtype=torch.int32)[None],
            torch.tensor([0, rows], dtype=torch.int32),
            torch.tensor([rows], dtype=torch.int32),
            torch.tensor([causal], dtype=torch.int32),
            row_spans,
            rows,
            rows,
        ),
        num_tokens=rows,
        window_anchor="canvas",
    )


def variant(kernel, args, kwargs):
    """Return what Triton specializes a launch on: constants, types and properties of numbers."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    found = []
    for name, value in sorted(values.items()):
        if isinstance(value, torch.Tensor):
            found.append((name, str(value.dtype), value.data_ptr() % 16 == 0))
        elif name.isupper() or value is None or name in ("num_warps", "num_stages"):
            found.append((name, value))
        elif isinstance(value, int):
            varies = name in VARYING
            found.append((name, None if varies else (value == 1, value % 16 == 0)))
    return (kernel.__name__, *found)


VARYING = ("num_seqs", "num_splits", "window_left", "window_right", "stride_table")


@pytest.mark.parametrize("has_images", [False, True])
def test_every_variant_that_serving_launches_is_compiled_at_the_start(has_images):
    """The warm-up compiles exactly the variants that serving text and images launches."""
    from attention_kernels.canvas_attention.triton import launch

    jit = launch.canvas_attention_kernel
    for name in VARYING:
        assert all(
            param.do_not_specialize
            for kernel in (jit, launch.combine_kernel)
            for param in getattr(kernel, "params", ())
            if param.name == name
        )
    layers, names = {}, ["layers.0", "layers.1", "layers.5"]
    for name, head_size, window in zip(
        names, (HEAD_SIZE, HEAD_SIZE, 2 * HEAD_SIZE), (1024, 1024, None), strict=True
    ):
        impl = make_impl(attention="triton", head_size=head_size, window=window)
        cache = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * head_size)
        layers[name] = SimpleNamespace(impl=impl, kv_cache=cache)
    config = configured(may_hold_images=has_images)
    config.compilation_config.static_forward_context = layers
    found = set()

    def record(kernel, grid):
        return lambda *args, **kwargs: found.add(variant(kernel, args, kwargs))

    registry = JitWarmupRegistry(config)
    with (
        mock.patch.object(type(jit), "__getitem__", record),
        mock.patch.object(launch, "multiprocessors", return_value=16),
    ):
        with registry.activate():
            for name in names:
                CanvasAttentionMetadataBuilder(None, [name], config, torch.device("cpu"))
        registry.warmup()
        at_start, served = set(found), found
        served.clear()
        for rows in (4, 400):
            spans = torch.zeros(rows, 2, dtype=torch.int32)
            for row_spans in (None, spans) if has_images else (None,):
                step = one_request(row_spans, rows, causal=rows)
                longest = NUM_BLOCKS * BLOCK_SIZE * 100
                step = replace(step, sequences=replace(step.sequences, max_seq_len=longest))
                for layer in layers.values():
                    query = torch.zeros(rows, NUM_HEADS, layer.impl.head_size)
                    layer.impl.forward(
                        None, query, query, query, layer.kv_cache, step, torch.empty_like(query)
                    )
    assert served == at_start
    # Two kinds of layers, in one piece or cut and folded, without and with images.
    assert len(at_start) == 2 * 3 * (2 if has_images else 1)
