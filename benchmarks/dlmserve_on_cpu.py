"""Serve a random LLaDA on a CPU with dlmserve, whose own loader knows GPUs alone.

    PEER_PYTHON benchmarks/dlmserve_on_cpu.py CHECKPOINT PUBLISHERS PORT MASK_ID

PEER_PYTHON has dlmserve 0.1.1, transformers 4.53.3 and torch. Its app, engine, scheduler and loop
run as published; only the loading of weights and tokenizer is replaced, in float32. PUBLISHERS is
the folder of ``tests/publishers``, where ``dllm`` has the publisher's class.
"""

import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ |= {
    "DLMSERVE_MODEL": "tiny",
    "DLMSERVE_DEVICE": "cpu",
    "DLMSERVE_DTYPE": "bf16",
    "DLMSERVE_LOG_LEVEL": "warning",
}


def load(folder: Path, publishers: Path, mask_id: int) -> Any:
    """Load a checkpoint by the publisher's class."""
    import torch
    from dlmserve.models.llada import LoadedLLaDA
    from safetensors.torch import load_file
    from transformers import PreTrainedTokenizerFast

    package = types.ModuleType("publisher")
    package.__path__ = [str(publishers / "dllm/dllm/pipelines/llada/models")]
    sys.modules["publisher"] = package
    classes = importlib.import_module("publisher.configuration_llada")
    modeling = importlib.import_module("publisher.modeling_llada")
    own = ("architectures", "auto_map", "model_type", "torch_dtype")
    content = json.loads((folder / "config.json").read_text())
    config = classes.LLaDAConfig(**{k: v for k, v in content.items() if k not in own})
    layers = modeling.create_model_config_from_pretrained_config(config)
    layers.init_device = "cpu"
    body = modeling.LLaDAModelLM(config, modeling.LLaDAModel(layers, init_params=False))
    body.load_state_dict(load_file(folder / "model.safetensors"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        padding_side="left",
    )
    tokenizer.chat_template = (folder / "chat_template.jinja").read_text()
    return LoadedLLaDA(
        model=body.float().eval(),
        tokenizer=tokenizer,
        device=torch.device("cpu"),
        dtype="bf16",
        mask_id=mask_id,
    )


def main() -> None:
    import dlmserve.engine
    import torch
    import uvicorn

    folder, publishers, port, mask_id = sys.argv[1:]
    torch.set_num_threads(1)
    dlmserve.engine.load_model = lambda *_, **__: load(Path(folder), Path(publishers), int(mask_id))
    from dlmserve.api.server import app

    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
