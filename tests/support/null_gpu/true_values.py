"""True values on the null GPU: the host computes what its kernels leave out, in their memory.

Device memory is host memory there, so that a tensor of the device is one of the host at the same
address. Operators of torch run their CPU kernels over it, Triton's kernels run in its interpreter,
and compiled operators of vLLM have a function here. While a graph is captured nothing runs: what
would have been launched is written down, and a replay runs it in its order. Views, allocations,
streams, events and vLLM's own copies stay what they are on a GPU.

:func:`compute` switches it on. The process must have been started with ``TRITON_INTERPRET=1``.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map, tree_map_only

# Of torch: what reads and writes no values, or copies to the host what it has waited for.
LEFT_ALONE = (
    "empty",
    "resize",
    "set_",
    "record_stream",
    "pin_memory",
    "is_pinned",
    "_local_scalar_dense",
)
VLLM_LIBRARIES = ("_C", "_moe_C", "_C_cache_ops")
# A library ends with the object that made it.
_libraries: list[torch.library.Library] = []
_recording: list[Callable[[], object]] | None = None


def compute() -> None:
    """Make every operator, Triton kernel and graph of this process compute."""
    _compute_operators_of_torch()
    _compute_operators_of_vllm()
    _interpret_on_the_host()
    _replay_what_was_captured()


def on_host(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor of the host, which must not outlive ``tensor``."""
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    alias = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return alias.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def launch(work: Callable[[], object]) -> None:
    """Do what a kernel does, now or in each replay of the graph that is being captured."""
    if _recording is None:
        work()
    else:
        _recording.append(work)


def _compute_operators_of_vllm() -> None:
    """Replace compiled operators by functions; others are refused when they are called."""
    libraries = {name: torch.library.Library(name, "IMPL") for name in VLLM_LIBRARIES}
    _libraries.extend(libraries.values())
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace in libraries and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            function = OPERATORS.get(operator) or _refused(name)
            libraries[namespace].impl(operator, _host(function), "CUDA", allow_override=True)


def _host(function: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        host_args = tree_map_only(Tensor, on_host, args)
        launch(lambda: function(*host_args))

    return run


def _refused(name: str) -> Callable[..., None]:
    def refuse(*args: Any) -> None:
        raise NotImplementedError(f"{name} has no values on the null GPU")

    return refuse


def _align_experts(
    chosen: Tensor,
    num_experts: int,
    size: int,
    rows: Tensor,
    experts: Tensor,
    end: Tensor,
    *_: None,
) -> None:
    """Sort rows by the expert that they chose, each expert's filled up to whole blocks.

    Args:
        chosen: [num_tokens, top_k], experts.
        num_experts: Experts there are.
        size: Rows of a block.
        rows: Written: entries of ``chosen``, or as many as those are where a block is filled up.
        experts: Written: the expert of each block.
        end: [1], written: rows of all blocks.
    """
    chosen = chosen.flatten()
    rows.fill_(len(chosen))
    start = 0
    for expert in range(num_experts):
        own = (chosen == expert).nonzero()[:, 0]
        rows[start : start + len(own)] = own
        blocks = -(-len(own) // size)
        experts[start // size : start // size + blocks] = expert
        start += blocks * size
    end.fill_(start)


def _sum_experts(outputs: Tensor, total: Tensor, *_: None) -> None:
    """Sum what a token's experts return: [num_tokens, top_k, hidden_size] to two dimensions."""
    total.copy_(outputs.sum(dim=1))


def _gate(result: Tensor, halves: Tensor) -> None:
    """Multiply the second half of each row by the GELU of the first."""
    gate, value = halves.chunk(2, dim=-1)
    result.copy_(functional.gelu(gate, approximate="tanh") * value)


OPERATORS: dict[str, Callable[..., None]] = {
    "moe_align_block_size": _align_experts,
    "moe_sum": _sum_experts,
    "gelu_tanh_and_mul": _gate,
}


def _compute_operators_of_torch() -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for operator in _operators_with_kernels():
        library.impl(operator, _computed(operator), "CUDA", allow_override=True)


def _operators_with_kernels() -> Iterator[Any]:
    """Return the operators that have a CUDA kernel in torch, and the copy between devices."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace != "aten" or packet.startswith(LEFT_ALONE):
            continue
        if name != "aten::copy_" and not torch._C._dispatch_has_kernel_for_dispatch_key(
            name, "CUDA"
        ):
            continue
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if not operator.is_view:
            yield operator


def _computed(operator: Any) -> Callable[..., Any]:
    """Return an operator's kernel for the device."""
    outs = [argument.name for argument in operator._schema.arguments if argument.is_out]
    written = [_written_argument(operator, value) for value in operator._schema.returns]

    def run(*args: Any, **kwargs: Any) -> Any:
        args = _with_tensors(operator, args)
        host_args, host_kwargs = tree_map_only(Tensor, on_host, (args, kwargs))
        if not outs and None not in written:
            launch(lambda: operator(*host_args, **host_kwargs))
            given = _by_name(operator, args, kwargs)
            return _returned([given[name] for name in written])

        def fresh_outs(device: str) -> dict[str, Tensor]:
            """Return tensors that the operator may reshape, as it may not the device's."""
            return {name: torch.empty(0, dtype=kwargs[name].dtype, device=device) for name in outs}

        def compute() -> Any:
            return operator(*host_args, **host_kwargs | fresh_outs("cpu"))

        if _recording is None:
            results = compute()
        else:
            # Their shapes alone: what they are computed of does not exist yet.
            without = tree_map_only(Tensor, _without_values, (host_args, host_kwargs))
            results = operator(*without[0], **without[1] | fresh_outs("meta"))
        if outs:
            targets = _returned([kwargs[name] for name in outs])
            tree_map(_resize, targets, results)
        else:
            targets = tree_map_only(Tensor, _like, results)
        memory = tree_map_only(Tensor, on_host, targets)
        if _recording is None:
            tree_map(_copy, memory, results)
        else:
            launch(lambda: tree_map(_copy, memory, compute()))
        return targets

    return run


def _returned(values: list[Any]) -> Any:
    """Return these values as the operator returns them."""
    return tuple(values) if len(values) > 1 else next(iter(values), None)


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _resize(target: Any, result: Any) -> None:
    if isinstance(target, Tensor) and target.shape != result.shape:
        target.resize_(result.shape)


def _copy(target: Any, result: Any) -> None:
    if isinstance(target, Tensor):
        target.copy_(result)


def _with_tensors(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with tensors again where torch passes the number from the code."""
    types = [str(argument.type) for argument in operator._schema.arguments]
    return tuple(
        torch.tensor(value) if kind == "Tensor" and isinstance(value, (bool, int, float)) else value
        for value, kind in zip(args, types, strict=False)
    )


def _written_argument(operator: Any, value: Any) -> str | None:
    """Return the argument that an operator writes and returns, or ``None``."""
    if value.alias_info is None or not value.alias_info.is_write:
        return None
    for argument in operator._schema.arguments:
        aliased = argument.alias_info
        if aliased is not None and aliased.before_set == value.alias_info.before_set:
            return argument.name
    raise AssertionError(operator)


def _by_name(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in operator._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda")


def _interpret_on_the_host() -> None:
    """Let Triton's interpreter use the device's memory without copying it for each launch."""
    from triton.runtime.interpreter import GridExecutor

    interpret = GridExecutor.__call__

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        args, kwargs = tree_map_only(Tensor, on_host, (args, kwargs))
        launch(lambda: interpret(self, *args, **kwargs))

    GridExecutor.__call__ = run


def _replay_what_was_captured() -> None:
    graphs = torch.cuda.CUDAGraph
    begin, end, replay = graphs.capture_begin, graphs.capture_end, graphs.replay

    def capture_begin(self: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> None:
        global _recording
        begin(self, *args, **kwargs)
        _recording = self.work = []

    def capture_end(self: torch.cuda.CUDAGraph) -> None:
        global _recording
        _recording = None
        end(self)

    def replay_all(self: torch.cuda.CUDAGraph) -> None:
        replay(self)
        for work in self.work:
            work()

    graphs.capture_begin, graphs.capture_end, graphs.replay = capture_begin, capture_end, replay_all
