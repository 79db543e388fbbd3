"""Checks of a checkpoint's tensors while vLLM's loader puts them into the model.

What a tensor must be is known where it is loaded: vLLM's layers give each parameter a function, its
``weight_loader``, which is handed every tensor that belongs there, with the part of the parameter
that the tensor is. Here these functions are watched. What was never handed over is missing; a
tensor that does not fit, that would be cut, or that differs from another one of the same place, is
refused by its name and file. vLLM itself notices a missing matrix only if the whole parameter is
missing and the model is not quantised.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.weights.new_weights import finite_only, is_finite
from vllm_diffusion.weights.places import UNUSED, Part, Place
from vllm_diffusion.weights.weight_files import (
    StoredTensor,
    largest_magnitude,
    listed,
    stored_tensors,
    weight_files,
)

logger = logging.getLogger("vllm.vllm_diffusion")

# Loaders of vLLM's that hand a model every tensor of safetensors files, as they are stored.
_LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
# Formats whose loader makes parameters of its own.
_UNCHECKED_FORMATS = ("bitsandbytes", "torchao", "gguf")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_AGAIN = "copy or download the checkpoint again"
# The logger and the beginning of vLLM's warning, which it writes for each tensor that it casts.
_CASTING_LOGGER = logging.getLogger("vllm.model_executor.models.utils")
_CAST_WARNING = "Attempted to load weight %s with dtype %s into"


class CheckedLoading:
    """One loading of all tensors of a checkpoint into a model."""

    _current: ClassVar[CheckedLoading | None] = None

    def __init__(self, model: nn.Module, vllm_config: VllmConfig) -> None:
        """Watch every parameter of the model, and every buffer that a checkpoint may hold.

        Args:
            model: Model as it was built, on any device.
            vllm_config: Configuration that it was built with.
        """
        self._model = model
        self._folder = Path(vllm_config.model_config.model)
        self._tp = vllm_config.parallel_config.tensor_parallel_size
        self._places: dict[int, Place] = {}
        # The tensor that the loader was handed last; loaders take one after the other.
        self._name, self._tensor = "", torch.empty(0)
        self._unused: dict[str, None] = {}
        self._unexpected: list[str] = []
        # Weights and biases of layers that went nowhere, and are not zero.
        self._left_out: list[str] = []
        self._is_over = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch what is loaded within.

        Raises:
            ValueError: Naming a tensor for which its layer has no place, and its file.
        """
        undo: list[Callable[[], None]] = []
        for prefix, module in self._model.named_modules():
            tensors = (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            )
            for end, tensor in tensors:
                if id(tensor) not in self._places and not end.endswith(UNUSED):
                    name = f"{prefix}.{end}" if prefix else end
                    size = get_tensor_load_numel(tensor)
                    self._places[id(tensor)] = place = Place(name, module, end, size)
                    undo.append(self._wrap(tensor, place))
        CheckedLoading._current = self
        try:
            yield
        except AttributeError:
            if self._name not in self._unused:
                raise
            # vLLM's joined layers take a tensor that they have no parameter for to be of their own.
            raise ValueError(
                f"{self._name}{self._file_of(self._name)} is {_described(self._tensor)}, which its layer has no place "
                "for by config.json; correct its quantization_config, or quantise the checkpoint again."
            ) from None
        finally:
            CheckedLoading._current = None
            self._is_over = True
            for one in undo:
                one()

    def _wrap(self, tensor: Any, place: Place) -> Callable[[], None]:
        has_own = hasattr(tensor, "weight_loader")
        stock = tensor.weight_loader if has_own else default_weight_loader

        @functools.wraps(stock)
        def load(*args: Any, **kwargs: Any) -> Any:
            return (
                stock(*args, **kwargs) if self._is_over else self._load(place, stock, args, kwargs)
            )

        def unwrap() -> None:
            if has_own:
                tensor.weight_loader = stock
            else:
                del tensor.weight_loader

        tensor.weight_loader = load
        return unwrap

    def pass_on(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors unchanged, and note which one the loader is at."""
        for name, tensor in weights:
            self._name, self._tensor = name, tensor
            self._unused[name] = None
            yield name, tensor
            if name not in self._unused or not name.endswith((".weight", ".bias")):
                continue
            if _NUMBER.search(name) and (tensor.ndim > 1 or tensor.any()):
                self._left_out.append(name)

    def _load(self, place: Place, stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        param = args[0] if args else kwargs["param"]
        loaded = args[1] if len(args) > 1 else kwargs["loaded_weight"]
        shard = args[2] if len(args) == 3 else kwargs.get("shard_id")
        part: Part = (kwargs.get("expert_id"), shard)
        self._unused.pop(self._name, None)
        if _is_plain(param) != _is_plain(loaded):
            raise ValueError(self._misfit(place, param, "by config.json it must be"))
        earlier = place.tensors.get(part)
        # A second tensor of the same place must change nothing.
        before = None if earlier is None else place.values(param, part)
        try:
            result = stock(*args, **kwargs)
        except (AssertionError, IndexError, RuntimeError, ValueError):
            raise ValueError(self._misfit(place, param, "by config.json its place is")) from None
        if result is False:
            # An expert of another rank.
            return result
        place.add(part, self._name, loaded)
        if before is not None and not torch.equal(before, place.values(param, part)):
            assert earlier is not None
            raise ValueError(
                f"{self._name}{self._file_of(self._name)} and {earlier[0]}{self._file_of(earlier[0])} are the same "
                "tensor of the model, but differ; keep the right one."
            )
        return result

    def _misfit(self, place: Place, param: Tensor, expected: str) -> str:
        stored, tensor = self._name, self._tensor
        ranks = f" on each of {self._tp} ranks" if self._tp > 1 else ""
        return (
            f"{stored}{self._file_of(stored)} is {_described(tensor)}, but {expected} {_described(param)} "
            f"({place.name}{ranks}); quantise or download the checkpoint again, or correct config.json (the "
            "ignore list of its quantization_config names the modules that are not quantised)."
        )

    def is_harmless(self, qualname: str) -> bool:
        """Note a tensor that no module has, and return true; :meth:`check` reports it.

        Args:
            qualname: Where vLLM's loader looked for it, from the module on that it is at.

        Raises:
            ValueError: If it is of a layer that the model does not have.
        """
        if qualname.rstrip(".").rpartition(".")[2].isdigit():
            raise ValueError(
                f"{self._name}{self._file_of(self._name)} is of a layer that config.json does not describe; correct "
                f"the number of layers there, or {_AGAIN}."
            )
        self._unexpected.append(self._name)
        return True

    def check(self) -> None:
        """Check that every place of the model was filled, once all tensors were passed on.

        Raises:
            ValueError: Naming tensors and files.
        """
        self._check_left_out()
        places = [place for place in self._places.values() if place.is_required]
        missing: dict[str, Part] = {
            self._stored_name(place, part): part
            for place in places
            for part in place.expected_parts()
            if part not in place.tensors
        }
        missing |= {self._stored_name(place, (None, None)): (None, None) for place in self._empty()}
        used = self._used() if missing else set()
        for name, (expert, _) in missing.items():
            if name in used:
                raise ValueError(
                    f"{name}{self._file_of(name)} lacks expert {expert}, which config.json describes; correct the "
                    f"number of experts there, or {_AGAIN}."
                )
        if missing:
            raise ValueError(
                f"{listed(list(missing))} should be in {self._folder}, by its config.json, but "
                f"{'is' if len(missing) == 1 else 'are'} not; {_AGAIN}, or correct quantization_config."
            )
        for place in places:
            if (misfitting := place.misfitting(self._tp)) is not None:
                names, num_values, size = misfitting
                raise ValueError(
                    f"{listed(names)}{self._file_of(names[0])} hold{'s' if len(names) == 1 else ''} {num_values:,} values, "
                    f"but by config.json {place.name} has {size:,} on each of {self._tp} ranks; correct config.json, "
                    f"--tensor-parallel-size where it cuts groups of a quantised weight, or {_AGAIN}."
                )
        self._check_finite()
        if self._unexpected:
            logger.warning(
                "%s%s of the checkpoint belong%s to no part of the model and will be ignored.",
                listed(self._unexpected),
                self._file_of(self._unexpected[0]),
                "s" if len(self._unexpected) == 1 else "",
            )

    def _check_finite(self) -> None:
        """Refuse numbers that are not finite, with which every answer would be token 0.

        Each parameter is read once where it lies, so that a GPU needs milliseconds for it. What a
        layer allocates but no tensor fills may hold anything: the file decides.
        """
        for place in self._places.values():
            held = getattr(place.layer, place.end, None)
            if not place.tensors or held is None or is_finite(held.data.as_subclass(Tensor)):
                continue
            for name in dict.fromkeys(name for name, _ in place.tensors.values()):
                stored = self._stored(name)
                largest = math.nan if stored is None else largest_magnitude(stored)
                if not math.isfinite(largest):
                    raise ValueError(
                        f"{name}{self._file_of(name)} holds numbers that are not finite, with which every answer would "
                        f"be nonsense; train or write the checkpoint again, or {_AGAIN}."
                    )
                if largest > torch.finfo(held.dtype).max:
                    raise ValueError(
                        f"{name}{self._file_of(name)} holds numbers up to {largest:.4g}, which {held.dtype} cannot hold; "
                        "set --dtype bfloat16."
                    )

    def _empty(self) -> list[Place]:
        """List buffers of layers that have some by the model's ``loaded_buffers``, of which none
        was loaded.
        """
        buffers: defaultdict[int, list[Place]] = defaultdict(list)
        for place in self._places.values():
            if place.end in getattr(self._model, "loaded_buffers", ()):
                buffers[id(place.layer)].append(place)
        return [of[0] for of in buffers.values() if not any(place.tensors for place in of)]

    def _used(self) -> set[str]:
        """Collect the names of tensors that were loaded into some place."""
        return {name for place in self._places.values() for name, _ in place.tensors.values()}

    def _check_left_out(self) -> None:
        """Refuse tensors without which a layer would compute something else, as vLLM lets it."""
        experts = [one for one in self._model.modules() if isinstance(one, RoutedExperts)]
        most = max((one.moe_config.num_logical_experts for one in experts), default=0)
        for name in self._unused:
            match = _EXPERT.search(name)
            if match is not None and experts and int(match[1]) >= most:
                raise ValueError(
                    f"{name}{self._file_of(name)} is of an expert that config.json does not describe, which has "
                    f"{most} experts; correct their number there, or {_AGAIN}."
                )
        # Layers of parts that are not served have nothing that is used.
        served = {_owner(name) for name in self._used()} if self._left_out else set()
        for name in self._left_out:
            if _owner(name) in served:
                raise ValueError(
                    f"{name}{self._file_of(name)} is of a layer, but of none of its parts as config.json describes "
                    f"them; correct config.json, or {_AGAIN}."
                )

    def _stored_name(self, place: Place, part: Part) -> str:
        """Return what a checkpoint calls a part, from the name of the same part in another
        layer.
        """
        expert, shard = part
        layers = _NUMBER.findall(place.name)
        pattern = _NUMBER.sub("N", place.name)
        for other in self._places.values():
            if _NUMBER.sub("N", other.name) != pattern:
                continue
            for (_, its_shard), (name, _) in other.tensors.items():
                if its_shard == shard:
                    # A tensor of all experts has no number of theirs.
                    numbers = [*layers, expert][: len(_NUMBER.findall(name))]
                    return _NUMBER.sub("{}", name).format(*numbers)
        return place.name

    def _file_of(self, name: str) -> str:
        """Return " in FILE" for a tensor of a local checkpoint."""
        stored = self._stored(name)
        return "" if stored is None else f" in {stored.file}"

    def _stored(self, name: str) -> StoredTensor | None:
        """Return a tensor of a local checkpoint as its file describes it."""
        files = weight_files(self._folder) if self._folder.is_dir() else []
        return next((one for one in stored_tensors(files) if one.name == name), None)


def _owner(name: str) -> str:
    """Return the module that has the module of a tensor."""
    return name.rpartition(".")[0].rpartition(".")[0]


def _is_plain(tensor: Tensor) -> bool:
    """Return true for numbers that are not quantised."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@replaces_call(
    "vllm.model_executor.models.utils:AutoWeightsLoader._can_ignore_unexpected",
    reason="A tensor that no module has ends the start, or is dropped silently, whatever it is.",
    until="AutoWeightsLoader hands what it has no place for to its model.",
)
def _asking(stock: Callable[..., bool], self: Any, qualname: str) -> bool:
    loading = CheckedLoading._current
    return stock(self, qualname) if loading is None else loading.is_harmless(qualname)


@contextmanager
def counted_downcasts() -> Iterator[None]:
    """Have what is loaded within reported by one line for each pair of dtypes, not one a tensor."""
    tensors: Counter[tuple[str, str]] = Counter()

    def is_other(record: logging.LogRecord) -> bool:
        """Count vLLM's warnings, and keep them from the log."""
        if record.levelno != logging.WARNING or not str(record.msg).startswith(_CAST_WARNING):
            return True
        assert isinstance(record.args, tuple)
        _, stored, served = record.args
        tensors[str(stored), str(served)] += 1
        return False

    _CASTING_LOGGER.addFilter(is_other)
    try:
        yield
    finally:
        _CASTING_LOGGER.removeFilter(is_other)
    for (stored, served), number in tensors.items():
        logger.info(
            "%d tensors of the checkpoint are %s, and served in %s.", number, stored, served
        )


@contextmanager
def checked_loading(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[Iterable[tuple[str, Tensor]]]:
    """Yield the tensors to load; check them if they are the first ones of a model.

    Later ones are an update, which may be partial: they are only checked to be finite. A model with
    made-up weights (``--load-format dummy``) has no first ones. Tensors of another dtype than the
    model's are counted in the log.

    Args:
        model: Model to load into, under ``with set_current_vllm_config``.
        weights: All tensors of its checkpoint, by name.

    Raises:
        ValueError: At the end, or while the tensors are loaded, naming tensor and file.
    """
    vllm_config = get_current_vllm_config_or_none()
    is_made_up = vllm_config is not None and vllm_config.load_config.load_format == "dummy"
    is_first = not is_made_up and not getattr(model, "_was_loaded", False)
    model._was_loaded = True  # type: ignore[assignment]
    with counted_downcasts():
        if not is_first:
            with finite_only(model, weights) as finite:
                yield finite
            return
        if vllm_config is None or not _is_checked(vllm_config):
            yield weights
            return
        _asking.install()
        loading = CheckedLoading(model, vllm_config)
        with loading.watch():
            yield loading.pass_on(weights)
        loading.check()


def _is_checked(vllm_config: VllmConfig) -> bool:
    # An update of weights may be loaded under no configuration of a model.
    return (
        vllm_config.model_config is not None
        and str(vllm_config.load_config.load_format) in _LOAD_FORMATS
        and vllm_config.model_config.quantization not in _UNCHECKED_FORMATS
    )
