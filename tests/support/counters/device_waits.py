"""Find calls that would wait for a GPU, on a machine without one."""

import traceback
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# They hand a value to the host, or a shape that depends on values.
_READERS = {
    "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__",
    "__contains__", "nonzero", "masked_select", "unique", "equal", "allclose",
}  # fmt: skip
# What an index of Python numbers or a mask costs: a blocking copy, or a count.
_INDEXERS = {"__getitem__", "__setitem__", "index_put_", "index_put"}


def _fills_by_index(index: Any, value: Any) -> bool:
    """Return whether a number is assigned by a tensor of indices, which copies it to the device."""
    parts = index if isinstance(index, tuple) else (index,)
    return not isinstance(value, Tensor) and any(isinstance(part, Tensor) for part in parts)


def _waits_in_index(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, list) or (isinstance(part, Tensor) and part.dtype == torch.bool)
        for part in parts
    )


class DeviceWaits(TorchFunctionMode):
    """Records where the code inside reads a tensor's value.

    Every tensor counts as one on the device, except what is made from NumPy arrays, from other such
    tensors and on their device, and those in ``on_host``: the engine's own host-side copies.
    """

    def __init__(self, on_host: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        self.found: list[str] = []
        self._host = {id(tensor): tensor for tensor in on_host}
        # What such tensors said of where they are.
        self._host_devices: dict[int, torch.device] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        host = bool(tensors) and all(id(tensor) in self._host for tensor in tensors)
        if not host and (
            (name in _READERS and tensors)
            or (name in _INDEXERS and _waits_in_index(args[1]))
            or (name == "__setitem__" and _fills_by_index(*args[1:]))
            or (name == "where" and len(args) == 1)
            or (name == "to" and "cpu" in map(str, args[1:]))
            # Code that means the host writes "cpu"; a device that is passed around is the GPU's.
            or (name in {"tensor", "as_tensor"} and isinstance(kwargs.get("device"), torch.device))
        ):
            caller = traceback.extract_stack(limit=2)[0]
            self.found.append(f"{name} at {caller.filename}:{caller.lineno}: {caller.line}")
        out = func(*args, **kwargs)
        if isinstance(out, torch.device) and host:
            self._host_devices[id(out)] = out
        device = kwargs.get("device")
        made_on_host = id(device) in self._host_devices or (
            name == "tensor" and not isinstance(device, torch.device)
        )
        if isinstance(out, Tensor) and (host or made_on_host) and name != "to":
            self._remember(out)
        return out

    def _remember(self, tensor: Tensor) -> Tensor:
        # Kept alive, so that its id is not another tensor's later.
        self._host[id(tensor)] = tensor
        return tensor

    def __enter__(self) -> Self:
        # The one maker of host tensors, which no mode sees.
        original = torch.from_numpy
        self._patch = mock.patch("torch.from_numpy", lambda array: self._remember(original(array)))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._patch.stop()
