"""Refusal of a request: an HTTP 400 that names the field."""

from __future__ import annotations

from typing import Any, NoReturn


def refuse(field: str, reason: str, value: Any = None) -> NoReturn:
    """Refuse a request.

    Args:
        field: Name of the field that the refusal is about.
        reason: What is wrong and the remedy, the rest of a sentence that begins with the field.
        value: The client's value, which the message ends with; ``None`` if it does not.

    Raises:
        VLLMValidationError: Always; the server answers 400.
    """
    from vllm.exceptions import VLLMValidationError

    raise VLLMValidationError(f"{field} {reason}", parameter=field, value=value)
