"""How vLLM learns what a model's class supports, where there is no accelerator."""

import importlib
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.models import ModelRegistry


@dataclass(frozen=True)
class InspectedHere:
    """Entry of vLLM's registry for a class that is imported when it is first asked for.

    vLLM's own entry imports the class in a process that only inspects it, since an accelerator must
    not be initialised before the engine's process begins, and keeps the result on disk. Here there
    is none to initialise, and this process has imported nearly everything that the class needs.

    Attributes:
        architecture: Name under which the class is registered.
        module_name: Module of the class.
        class_name: Its name there.
    """

    architecture: str
    module_name: str
    class_name: str

    def load_model_cls(self) -> Any:
        """Import the class."""
        return getattr(importlib.import_module(self.module_name), self.class_name)

    def inspect_model_cls(self) -> Any:
        """Register the imported class in place of this entry, and return what vLLM finds of it."""
        ModelRegistry.register_model(self.architecture, self.load_model_cls())
        return ModelRegistry.models[self.architecture].inspect_model_cls()
