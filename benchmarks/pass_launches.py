"""What a pass launches on a GPU besides the backbone, counted in an engine on a machine that has none.

Counted are, each as one:

- operations on tensors that a GPU would hold: all but views and allocations;
- copies to the device (vLLM's ``async_tensor_h2d``), by themselves;
- replays of a graph, whatever is in it (``cudaGraphLaunch`` is one call);
- kernels of a compiled function: what Inductor fuses its operations to.

Not counted is what a GPU does not launch: arithmetic on tensors that NumPy made, and vLLM's copies into
memory that a GPU reads where it is (``UvaBufferPool``). What the runner does for any model is the same
for everybody and is left out: only the calls that are handed to :meth:`PassLaunches.watch` count.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.replace_random import replace_random_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from tests.support.graphs import emulated_capture

COPY, GRAPH = "copy to the device", "graph"


class PassLaunches(TorchDispatchMode):
    """Counts while a watched call runs.

    Attributes:
        counts: By what is launched, since the last :meth:`end_pass`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        # Inside a watched call, and outside what counts as one.
        self._counting = False
        # Tensors that NumPy made in this pass: kept, so that no other one takes their place in memory.
        self._host: dict[int, Tensor] = {}

    def end_pass(self) -> Counter[str]:
        """What was counted since the last call."""
        counts = self.counts
        self.counts = Counter()
        self._host.clear()
        return counts

    def watch(self, owner: Any, name: str) -> None:
        """Count during calls of ``owner.name``."""
        watched: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._counting:
                return watched(*args, **kwargs)
            self._counting = True
            try:
                with self:
                    return watched(*args, **kwargs)
            finally:
                self._counting = False

        setattr(owner, name, call)

    def as_one(
        self, function: Callable[..., Any], what: str, number: int = 1
    ) -> Callable[..., Any]:
        """``function`` as so many launches."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._counting_once(what, lambda: number):
                return function(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def _counting_once(self, what: str, number: Callable[[], int]) -> Iterator[None]:
        """What runs inside is so many launches, whatever it does."""
        was_counting, self._counting = self._counting, False
        try:
            with _disable_current_modes():
                yield
        finally:
            self._counting = was_counting
        if was_counting:
            self.counts[what] += number()

    def compile(self, function: Callable[..., Any], backend: Any = None) -> Callable[..., Any]:
        """``function`` as the launches of what Inductor makes of it; it runs without being compiled."""
        kernels: list[int] = []
        of_shapes: dict[tuple[torch.Size, ...], int] = {}
        run = torch.compile(
            function, fullgraph=True, dynamic=False, backend=_fusing_backend(kernels)
        )

        def call(*args: Any, **kwargs: Any) -> Any:
            shapes = tuple(x.shape for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
            with self._counting_once(_name(function), lambda: of_shapes[shapes]):
                result = run(*args, **kwargs)
                of_shapes.setdefault(shapes, kernels[-1])
            return result

        return call

    def capture(
        self, function: Callable[..., Any], inputs: tuple[Tensor, ...]
    ) -> Callable[[], Any]:
        """A captured graph, emulated; a replay is one launch."""
        return self.as_one(emulated_capture(function, inputs), f"{GRAPH} of {_name(function)}")

    @contextlib.contextmanager
    def installed(self) -> Iterator[PassLaunches]:
        """Replace what copies to the device, and what a GPU reads where it is, in all of vLLM."""
        from vllm.v1.worker.gpu.buffer_utils import UvaBufferPool

        name, from_numpy = "async_tensor_h2d", torch.from_numpy
        # The CPU platform has one of its own, and modules that were imported before have vLLM's.
        found = {
            module: getattr(module, name)
            for module in list(sys.modules.values())
            if name in getattr(module, "__dict__", ())
        }

        def hosted(array: Any) -> Tensor:
            tensor = from_numpy(array)
            if self._counting:
                self._host[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        def in_place(pool: Any, values: Any) -> Tensor:
            with _disable_current_modes():
                return to_uva(pool, values)

        to_uva = UvaBufferPool.copy_to_uva
        with contextlib.ExitStack() as stack:
            for module, function in found.items():
                stack.enter_context(mock.patch.object(module, name, self.as_one(function, COPY)))
            stack.enter_context(mock.patch.object(torch, "from_numpy", hosted))
            stack.enter_context(mock.patch.object(UvaBufferPool, "copy_to_uva", in_place))
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        is_view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        no_launch = is_view or "empty" in schema.name or schema.name.startswith("prim::")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_host = bool(tensors) and all(
            x.untyped_storage().data_ptr() in self._host for x in tensors
        )
        if on_host and isinstance(result, Tensor):
            self._host[result.untyped_storage().data_ptr()] = result
        if not (no_launch or on_host):
            self.counts[schema.name] += 1
        return result


class HostClock:
    """The host's seconds in watched calls, without those in what :class:`PassLaunches` counts as one."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._watching = False

    def end_pass(self) -> float:
        """What was clocked since the last call, in seconds of this thread."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def watch(self, owner: Any, name: str) -> None:
        """Clock calls of ``owner.name``; those inside of them are part of theirs."""
        watched: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._watching:
                return watched(*args, **kwargs)
            self._watching = True
            self._seconds -= time.thread_time()
            try:
                return watched(*args, **kwargs)
            finally:
                self._seconds += time.thread_time()
                self._watching = False

        setattr(owner, name, call)

    def as_one(
        self, function: Callable[..., Any], _what: str, _number: int = 1
    ) -> Callable[..., Any]:
        """``function`` as a launch: its own time is left out."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._watching:
                return function(*args, **kwargs)
            self._watching = False
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds -= time.thread_time() - started
                self._watching = True

        return call

    def compile(self, function: Callable[..., Any], backend: Any = None) -> Callable[..., Any]:
        """``function`` as what a compiled one launches; it runs without being compiled."""
        return self.as_one(function, _name(function))

    def capture(
        self, function: Callable[..., Any], inputs: tuple[Tensor, ...]
    ) -> Callable[[], Any]:
        """As :meth:`PassLaunches.capture`."""
        return self.as_one(emulated_capture(function, inputs), _name(function))


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))


def _fusing_backend(kernels: list[int]) -> Callable[..., Any]:
    """Of ``torch.compile``: appends how many kernels Inductor would launch, and runs the operations."""

    def fuse(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        kernels.append(_num_kernels(copy.deepcopy(module), inputs))
        return module.forward

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=fuse, decompositions=select_decomp_table()
    )
    return backend


def _num_kernels(module: torch.fx.GraphModule, inputs: list[Any]) -> int:
    """Kernels of a function's operations on an SM90; which is there is not asked."""
    gpu = torch.device("cuda", 0)
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": gpu}
    # What DeviceProperties.create() would read of the device.
    properties = DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)
    mode = FakeTensorMode()
    with (
        V.set_fake_mode(mode),
        V.set_debug_handler(DebugContext()),
        mock.patch.object(DeviceProperties, "create", return_value=properties),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(scheduler, "has_triton", return_value=True),
    ):
        with mode:
            there = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=gpu) for x in inputs
            ]
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*there)
        # As Inductor does before it fuses: draws become operations like others.
        replace_random_passes(module)
        graph = GraphLowering(module, example_inputs=there, shape_env=None)
        with V.set_graph_handler(graph):
            graph.run(*there)
            graph._update_scheduler()
            nodes = graph.scheduler.nodes
        return sum(not isinstance(node, scheduler.NopKernelSchedulerNode) for node in nodes)
