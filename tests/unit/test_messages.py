"""What clients and operators read has one form."""

import re

import pytest

from tests.support.messages import messages

# What may end a refusal: a sentence, or what the caller puts at its end.
END = re.compile(r"[.}]$")
# Sentences as nobody writes them.
WORDS = re.compile(r"\b(?:is|are) no (?!more\b|longer\b|such\b)[a-z]|\bthereof\b|\bhereby\b")


@pytest.mark.engine
def test_form() -> None:
    """Refusals are whole sentences of one line, and no message is a negated noun."""
    found = list(messages())
    assert len(found) > 300
    for message in found:
        for text in message.texts:
            said = re.sub(r"\bthere (?:is|are) no\b", "", text)
            assert not WORDS.search(said), message
            if message.by == "refuse":
                assert END.search(text) or text.islower(), message
                assert "\n" not in text, message
