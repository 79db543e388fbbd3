"""Any quantization config is read, left to vLLM, or refused by the name of a field."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.checkpoints import benchmark_config
from vllm_diffusion.weights.formats import read_format

NAMES = ("fp8-dynamic", "nvfp4", "nvfp4-weights", "nvfp4-modelopt")
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["re:[", "128x128", "block", "group", "float", [128], [0, 0], [1, "2"]]),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none()), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the keys that lead to each value in an object, without the entries of lists."""
    if not isinstance(value, dict):
        return []
    return [
        one
        for key, inner in value.items()
        for one in ((*path, key), *paths_of(inner, (*path, key)))
    ]


def refusal(settings: dict[str, Any]) -> str | None:
    """Return the sentence with which a config is refused; ``None`` if it is read."""
    try:
        read_format(settings)
    except ValueError as error:
        message = str(error)
        assert "\n" not in message
        assert message.endswith(".")
        return message
    return None


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_any_value(name: str, data: st.DataObject) -> None:
    """A config with any value in one field is read, or refused by the name of the field."""
    settings = benchmark_config(name)
    *outer, last = data.draw(st.sampled_from(paths_of(settings)))
    inner: Any = settings
    for key in outer:
        inner = inner[key]
    if data.draw(st.booleans()):
        del inner[last]
    else:
        inner[last] = data.draw(VALUES)
    message = refusal(settings)
    if message is not None:
        parents = [str(key) for key in (*outer, last)]
        assert any(f"{name}" in message for name in parents[-2:])
        assert "quantization_config" in message


def fp8(**changes: Any) -> dict[str, Any]:
    return {**benchmark_config("fp8-dynamic"), **changes}


def with_weights(**changes: Any) -> dict[str, Any]:
    settings = fp8()
    settings["config_groups"]["group_0"]["weights"] |= changes
    return settings


def test_block_as_text() -> None:
    """A block size as text, such as "128x128", is read as two numbers."""
    assert refusal(with_weights(strategy="block", block_structure="128x128")) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (with_weights(strategy="row"), ["weights.strategy='row'", '"channel"', '"block"']),
        (with_weights(strategy=7), ["weights.strategy=7", '"channel"']),
        (with_weights(strategy="group", group_size=32), ["strategy='group'", "tensor or channel"]),
        (with_weights(block_structure="many"), ["weights.block_structure='many'", "rows, cols"]),
        (with_weights(strategy="block", block_structure="128"), ["block_structure=[128]", "two"]),
        (with_weights(num_bits="eight"), ["weights.num_bits='eight'", "integer"]),
        (fp8(ignore="lm_head"), ["ignore='lm_head'", "a list"]),
        (fp8(ignore=["re:("]), ["ignore='re:('", "regular expression"]),
        (fp8(config_groups=[1]), ["config_groups=[1]", "an object"]),
        (fp8(format="float-quantised"), ["float-quantised", "nvfp4"]),
        (
            benchmark_config("nvfp4-modelopt") | {"config_groups": 3},
            ["config_groups=3", "an object"],
        ),
    ],
    ids=str,
)
def test_fields(settings: dict[str, Any], words: list[str]) -> None:
    """A refusal has the field, its value and what is served."""
    message = refusal(settings)
    assert message is not None
    assert all(word in message for word in words), message


@pytest.mark.parametrize("version", ["0.18.0", "99.1", "latest", None, 3])
def test_version_of_the_writer(version: Any) -> None:
    """The version of the tool that wrote a file does not decide whether it is served."""
    assert refusal(fp8(version=version)) is None
