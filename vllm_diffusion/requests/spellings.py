"""Constraints in the spellings of other servers, which vLLM's protocols drop.

A constraint that is dropped gives a free answer with status 200. One that means the same here is
written as ``structured_outputs`` (of ``/v1/messages`` as ``output_config``); any other one, and one
beside a different constraint of the same body, is refused by its name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicJsonOutputFormat, AnthropicOutputConfig
from vllm.sampling_params import StructuredOutputsParams

from vllm_diffusion.requests.bounds import members
from vllm_diffusion.requests.refusals import CONSTRAINT, note_constraint, refuse

# Fields of vLLM's before 0.12, by the name that they have within ``structured_outputs``. Clients
# for all releases (guidance) send both forms, of which vLLM reads its own. In NIM's ``nvext`` they
# are current.
_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")} | {
    "guided_whitespace_pattern": "whitespace_pattern",
    "guided_decoding_backend": "",
}
# Fields of SGLang, llama.cpp, TGI and TabbyAPI, and the field of ``structured_outputs`` with the
# same purpose. Their values differ: grammars have other syntaxes, schemas may be text.
_ELSEWHERE = {
    "json_schema": "json",
    "regex": "regex",
    "regex_pattern": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "grammar_string": "grammar",
    "structural_tag": "structural_tag",
}
_NOWHERE = "no field: leave it out"
NAMES = frozenset({*_GUIDED, *_ELSEWHERE, "format", "output_format", "nvext"})


def read_spellings(request: Any, fields: Mapping[str, Any]) -> None:
    """Have a body hold to a constraint that it has in another server's spelling.

    Args:
        request: Body of a request, as vLLM's protocol read it; its ``structured_outputs`` or
            ``output_config`` is set in place.
        fields: The fields that the protocol does not know, or all of them.

    Raises:
        VLLMValidationError: Naming the field.
    """
    _refuse_older(request, fields)
    found = [*_found(request, fields)]
    if not found:
        return
    name, constraint = found[0]
    for other, value in (*_own(request), *found[1:]):
        if value != constraint:
            refuse(name, f"cannot be combined with {other}; leave one of them out.")
    note_constraint(name)
    known = type(request).model_fields
    if "output_config" in known and "json" in constraint:
        wanted = AnthropicJsonOutputFormat(schema=constraint["json"])
        config = request.output_config or AnthropicOutputConfig()
        request.output_config = config.model_copy(update={"format": wanted})
    elif "structured_outputs" in known:
        request.structured_outputs = StructuredOutputsParams(**constraint)
        # The same in another form, of which vLLM takes one.
        if "response_format" in known:
            request.response_format = None
        if getattr(request, "text", None) is not None:
            request.text = request.text.model_copy(update={"format": None})
    else:
        refuse(name, "is not supported by this endpoint, which takes only JSON schemas.")


def constraining_field(request: Any) -> str | None:
    """Return the field in which a body has its constraint; ``None`` if it has none.

    Args:
        request: Body of a request, as vLLM's protocol read it.
    """
    if getattr(request, "structured_outputs", None) is not None:
        return CONSTRAINT
    for field, form in _forms(request):
        if form["type"] != "text":
            return field
    if getattr(getattr(request, "output_config", None), "format", None) is not None:
        return "output_config.format"
    return "tools" if getattr(request, "tools", None) else None


def _refuse_older(request: Any, fields: Mapping[str, Any]) -> None:
    if getattr(request, "structured_outputs", None) is not None:
        return
    for name in fields.keys() & _GUIDED.keys():
        if fields[name] is not None:
            own = f"structured_outputs.{_GUIDED[name]}" if _GUIDED[name] else _NOWHERE
            refuse(name, f"is a field of older releases of vLLM; here it is {own}.")
    for name in fields.keys() & _ELSEWHERE.keys():
        # Some front ends send each field of each server, empty where it is not set.
        if fields[name]:
            own = f"structured_outputs.{_ELSEWHERE[name]}"
            refuse(name, f"is a field of other servers; here it is {own}.")


def _found(request: Any, fields: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Find constraints in other spellings, as arguments of ``StructuredOutputsParams``."""
    for field, form in _forms(request):
        if (schema := _foreign_schema(form)) is not None:
            if form["type"] != "json_object" or not isinstance(schema, Mapping):
                refuse(field, 'must have the type "json_object" beside a schema, an object.')
            # One that demands nothing is an object all the same.
            yield field, {"json": schema} if schema else {"json_object": True}
    if sent := fields.get("format"):
        if sent != "json" and not isinstance(sent, Mapping):
            refuse("format", 'must be "json" or a JSON schema; response_format has other forms.')
        yield "format", {"json_object": True} if sent == "json" else {"json": sent}
    if (sent := fields.get("output_format")) is not None:
        if "output_config" not in type(request).model_fields:
            refuse("output_format", "is a field of /v1/messages; here it is response_format.")
        is_schema = isinstance(sent, Mapping) and sent.get("type") == "json_schema"
        if not is_schema or not isinstance(sent.get("schema"), Mapping):
            refuse("output_format", 'must be {"type": "json_schema", "schema": ...}.')
        yield "output_format", {"json": sent["schema"]}
    extension = fields.get("nvext")
    if isinstance(extension, Mapping):
        kinds = {kind: extension.get(name) for name, kind in _GUIDED.items() if kind}
        if constraint := {kind: value for kind, value in kinds.items() if value is not None}:
            yield "nvext", constraint


def _own(request: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Find the constraints of a body in this server's own spelling."""
    if (own := getattr(request, "structured_outputs", None)) is not None:
        yield "structured_outputs", {name: value for name, value in vars(own).items() if value}
    for field, form in _forms(request):
        if form["type"] != "text" and _foreign_schema(form) is None:
            schema = form.get("schema_") or _named_schema(form)
            yield field, {"json": schema} if schema else {form["type"]: True}
    config = getattr(request, "output_config", None)
    if config is not None and config.format is not None:
        yield "output_config.format", {"json": config.format.json_schema}


def _forms(request: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Find what a body has of OpenAI's two fields for forms of answers."""
    text = getattr(request, "text", None)
    forms = {
        "response_format": getattr(request, "response_format", None),
        "text.format": getattr(text, "format", None),
    }
    for field, form in forms.items():
        if form is not None:
            # vLLM has not parsed it in a batch.
            read = form if isinstance(form, Mapping) else dict(members(form))
            yield field, {"type": None, **read}


def _foreign_schema(form: Mapping[str, Any]) -> Any:
    """Return the schema of llama.cpp's and Together's form, or of one with a type that has none;
    ``None`` if there is none.
    """
    is_named = form["type"] == "json_object" and form.get("json_schema") is not None
    return _named_schema(form) if is_named else form.get("schema")


def _named_schema(form: Mapping[str, Any]) -> Any:
    """Return the schema that a form has with a name; ``None`` if there is none."""
    named = dict(members(form.get("json_schema")))
    # vLLM's protocol has it under the second name.
    return named.get("schema", named.get("json_schema"))
