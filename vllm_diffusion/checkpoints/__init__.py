"""The tiny checkpoints that come with this package, and the tasks that they were trained on."""

from pathlib import Path, PurePosixPath

__all__ = ["InstallationError", "shipped_checkpoint", "shipped_draft"]

CHECKPOINTS = Path(__file__).resolve().parent
# Questions and a CPU's answers; examples/checkpoints/write_answers.py writes it.
ANSWERS = CHECKPOINTS / "answers.jsonl"
# The folder of each family's checkpoint; the first is the default.
FOLDERS = {
    "diffusion_gemma": CHECKPOINTS / "tiny_diffusion_gemma",
    "sdar": CHECKPOINTS / "tiny_sdar",
    "qwen3": CHECKPOINTS / "tiny_qwen3",
    "mineru": CHECKPOINTS / "tiny_mineru",
}
# The others answer questions; this one reads pages.
READER = "mineru"
# What drafts for those of them that are autoregressive.
DRAFT_FOLDERS = {"qwen3": CHECKPOINTS / "tiny_qwen3_dflash"}
DRAFTED_FAMILY = next(iter(DRAFT_FOLDERS))
DEFAULT_FAMILY = next(iter(FOLDERS))
# examples/checkpoints/tiny_tasks.py draws them; docs/use/serving.md has the same sentence.
TASKS = (
    "This tiny model adds numbers up to 20, reverses words, writes them in capitals, counts, makes "
    'lists and writes JSON, and can do little else: try "What is 7+8?" or "Reverse the word lamp."'
)
READER_TASKS = (
    "This tiny model reads pages of one to three lines of one to five large digits, and can do nothing "
    "else: try a page that `python examples/documents.py --lines 60 17283 4096` draws."
)
_NEEDED_OF_DRAFT = ("config.json", "model.safetensors")
_NEEDED = (*_NEEDED_OF_DRAFT, "generation_config.json", "tokenizer.json")


class InstallationError(FileNotFoundError):
    """A file of a shipped checkpoint is missing."""


def shipped_checkpoint(family: str = DEFAULT_FAMILY) -> Path:
    """Return the folder of a tiny checkpoint that comes with this package.

    Args:
        family: ``"diffusion_gemma"``, ``"sdar"``, ``"qwen3"``, which is autoregressive, or
            ``"mineru"``, which reads pages.

    Raises:
        InstallationError: If the installation lacks one of its files.
    """
    return _complete(FOLDERS[family], _NEEDED)


def shipped_draft(family: str = DRAFTED_FAMILY) -> Path:
    """Return the folder of the draft that comes with a tiny checkpoint.

    Args:
        family: ``"qwen3"``.

    Raises:
        InstallationError: If the installation lacks one of its files.
    """
    return _complete(DRAFT_FOLDERS[family], _NEEDED_OF_DRAFT)


def shipped_tasks(model: str) -> str:
    """Return a sentence on what a shipped checkpoint can do, and of any other model an empty
    string.

    Args:
        model: Path or name by which a server knows its model. The server may be on another machine.
    """
    path = PurePosixPath(model)
    if path.parts[-3:-1] != CHECKPOINTS.parts[-2:]:
        return ""
    return READER_TASKS if path.name == FOLDERS[READER].name else TASKS


def _complete(folder: Path, needed: tuple[str, ...]) -> Path:
    for name in needed:
        if not (folder / name).is_file():
            raise InstallationError(
                f"The shipped checkpoint has no {folder / name}; install vllm-diffusion again."
            )
    return folder
