"""Settings of drafts in ``--additional-config``, validated once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.drafting.recording import Ring
from vllm_diffusion.drafting.reveal_block import CONFIDENCE, ORDERS, SCHEDULES, unmask_counts
from vllm_diffusion.startup.plugin_settings import check_choices, section_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "--additional-config '{\"drafting\": {...}}'"


@dataclass(frozen=True)
class RecordSettings:
    """Settings of a recording of a server's traffic.

    Attributes:
        folder: Folder of the recording, made if absent, readable by its owner alone.
        max_mib: MiB that an engine keeps; 1 MiB holds some 200,000 tokens. The oldest go first.
    """

    folder: str
    max_mib: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str) or not self.folder:
            raise ValueError(f"record.folder={self.folder!r} must be the path of a folder.")
        size = self.max_mib
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"record.max_mib={size!r} must be an integer of at least 1.")

    def ring(self, engine: int = 0) -> Ring:
        """Return the files that an engine records to.

        Args:
            engine: Index of the engine in data parallelism.
        """
        folder = Path(self.folder).expanduser().absolute()
        return Ring(folder, f"engine{engine}", self.max_mib * 2**20)


def _record_settings(section: Any) -> RecordSettings:
    if not isinstance(section, Mapping) or "folder" not in section:
        raise ValueError(
            f'record={section!r} must be a mapping with "folder", where the traffic is recorded.'
        )
    names = [each.name for each in fields(RecordSettings)]
    if unknown := sorted(set(section) - set(names)):
        raise ValueError(f"record has no setting {unknown[0]!r}; it has {', '.join(names)}.")
    return RecordSettings(**section)


@dataclass(frozen=True)
class DraftSettings:
    """Settings in ``--additional-config '{"drafting": {...}}'``.

    Attributes:
        steps: Number of passes over a block.
        schedule: Number of positions that each pass reveals, a key of :data:`SCHEDULES`.
        order: Order of revealing: the most confident position first, or the leftmost.
        reveals: Token that is revealed: always the likeliest. If passes drew tokens, their order
            would depend on the draws, and vLLM's test of a proposal by ``p / q`` is exact only if a
            position's distribution does not depend on the draws at others.
        window: Tokens that a row of the draft sees back; ``None`` for the checkpoint's window.
        adaptive: True if each step drafts as many tokens as pay, or none. It works with any draft.
        record: Settings of the recording; ``None`` for none. It works with and without a draft.
    """

    steps: int = 1
    schedule: str = "cosine"
    order: str = CONFIDENCE
    reveals: str = "likeliest"
    window: int | None = None
    adaptive: bool = False
    record: RecordSettings | None = None

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("window", self.window)):
            is_integer = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not is_integer and (name, value) != ("window", None):
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive={self.adaptive!r} must be true or false.")
        if self.reveals == "sampled":
            raise ValueError(
                'reveals="sampled" is not served: revealed by confidence, sampled tokens that are '
                "verified by their probabilities change the target's answers; leave reveals out, and "
                'set "draft_sample_method": "probabilistic" in --speculative-config to propose sampled '
                "tokens of the last pass."
            )
        check_choices(
            self, {"schedule": tuple(SCHEDULES), "order": ORDERS, "reveals": ("likeliest",)}
        )

    def unmask_counts(self, num_positions: int) -> tuple[int, ...]:
        """Return the number of positions that each pass over ``num_positions`` masks reveals.

        Raises:
            ValueError: If there are more passes than positions.
        """
        try:
            return unmask_counts(num_positions, self.steps, self.schedule)
        except ValueError as error:
            raise ValueError(f"{OPTION}: {error}") from None


def draft_settings(vllm_config: VllmConfig) -> DraftSettings:
    """Parse and validate ``additional_config["drafting"]``.

    Raises:
        ValueError: Naming the setting, what it got and what is allowed.
    """
    section = section_of(vllm_config.additional_config, "drafting", OPTION)
    known = [each.name for each in fields(DraftSettings)]
    if unknown := sorted(set(section) - set(known)):
        raise ValueError(
            f"{OPTION}: {unknown[0]!r} is not a setting of drafts; these are {', '.join(known)}."
        )
    try:
        record = section.get("record")
        changes = {} if record is None else {"record": _record_settings(record)}
        return DraftSettings(**{**section, **changes})
    except ValueError as error:
        raise ValueError(f"{OPTION}: {error}") from None
