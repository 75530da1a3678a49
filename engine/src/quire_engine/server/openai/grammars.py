"""From the fields of a request to the constraint of its answers."""

from typing import Any

import msgspec

from quire_engine.errors import InvalidRequest
from quire_engine.grammar.spec import GrammarKind, GrammarSpec
from quire_engine.server.openai.schemas import GenerationRequest, ResponseFormat, StructuredOutputs

_encode = msgspec.json.Encoder(decimal_format="number").encode
_ANY_OBJECT = '{"type":"object"}'


def grammar_of(request: GenerationRequest) -> GrammarSpec | None:
    """Return the constraint of a request's answers; None for any text. Raises InvalidRequest."""
    specs = [
        spec
        for spec in (_response_format(request.response_format), _structured(request.structured_outputs))
        if spec is not None
    ]
    specs += _guided(request)
    if len(specs) > 1:
        names, second = " and ".join(spec.param for spec in specs), specs[1]
        raise InvalidRequest(f"{second.param}: a request can have one constraint, but has {names}", param=second.field)
    return specs[0] if specs else None


def _response_format(wanted: ResponseFormat | None) -> GrammarSpec | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarSpec(kind="json_schema", text=_ANY_OBJECT, param="response_format")
    if wanted.type == "json_schema":
        assert wanted.json_schema is not None
        return _spec("json_schema", wanted.json_schema.schema_, "response_format.json_schema.schema")
    names = ("format", "structures", "triggers")
    tag = {name: value for name in names if (value := getattr(wanted, name)) is not None}
    return _spec("structural_tag", tag, "response_format")


def _structured(wanted: StructuredOutputs | None) -> GrammarSpec | None:
    if wanted is None:
        return None
    space = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
    if wanted.json_object:
        return GrammarSpec(
            kind="json_schema", text=_ANY_OBJECT, param="structured_outputs.json_object", whitespace_pattern=space
        )
    if wanted.json_ is not None:
        return _spec("json_schema", wanted.json_, "structured_outputs.json", space)
    if wanted.structural_tag is not None:
        return _spec("structural_tag", wanted.structural_tag, "structured_outputs.structural_tag")
    if wanted.choice is not None:
        return _spec("choice", wanted.choice, "structured_outputs.choice")
    if wanted.regex is not None:
        return GrammarSpec(kind="regex", text=wanted.regex, param="structured_outputs.regex")
    assert wanted.grammar is not None
    return GrammarSpec(kind="grammar", text=wanted.grammar, param="structured_outputs.grammar")


def _guided(request: GenerationRequest) -> list[GrammarSpec]:
    specs = []
    if request.guided_json is not None:
        specs.append(_spec("json_schema", request.guided_json, "guided_json", request.guided_whitespace_pattern))
    if request.guided_choice is not None:
        specs.append(_spec("choice", request.guided_choice, "guided_choice"))
    if request.guided_regex is not None:
        specs.append(GrammarSpec(kind="regex", text=request.guided_regex, param="guided_regex"))
    if request.guided_grammar is not None:
        specs.append(GrammarSpec(kind="grammar", text=request.guided_grammar, param="guided_grammar"))
    return specs


def _spec(kind: GrammarKind, value: Any, param: str, whitespace_pattern: str | None = None) -> GrammarSpec:
    """Return a constraint whose value is JSON, or a string of JSON."""
    try:
        text = value if isinstance(value, str) else _encode(value).decode()
        if isinstance(value, str):
            msgspec.json.decode(value)
    except (RecursionError, ValueError, OverflowError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {error}"
        field = param.partition(".")[0]
        raise InvalidRequest(f"{param}: {reason}", param=field, code="invalid_grammar") from error
    return GrammarSpec(kind=kind, text=text, param=param, whitespace_pattern=whitespace_pattern)
