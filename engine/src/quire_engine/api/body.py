"""Request bodies: from bounded JSON bytes to a validated object, or one 400 with every reason.

The memory of all bodies together is bounded, from the first byte until the prompts are encoded.
"""

import asyncio
import logging
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, Self, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails
from starlette.requests import Request

from quire_common.surrogates import repaired
from quire_engine.api.problems import MAX_REASONS, joined_reasons, shortened
from quire_engine.errors import BodyTooLarge, InvalidRequest, RequestTimeout, Unavailable, UnsupportedMedia

_log = logging.getLogger(__name__)


def json_type(value: Any) -> str:
    """Return the JSON name of a value's type, with an article."""
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def one_or_list(wrap: Callable[[str], Any], items: str) -> BeforeValidator:
    """Return a check of a field that is one string, which becomes a list with ``wrap`` of it, or a list.

    A union would report the reasons of both forms.
    """

    def check(value: Any) -> Any:
        if isinstance(value, str):
            return [wrap(value)]
        if not isinstance(value, list):
            raise ValueError(f"should be a string or an array of {items}, not {json_type(value)}")
        return value

    return BeforeValidator(check)


STRING_OR_OBJECTS = WithJsonSchema(
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}
)


def known_type(*known: str, of_role: str | None = None) -> BeforeValidator:
    """Return a check that names a ``type`` that is not supported, before the union's own errors.

    An object with a role and without a type has the type ``of_role``, if there is one.
    """

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"should be an object, not {json_type(value)}")
        kind = value.get("type")
        if kind is None and of_role is not None and "role" in value:
            return {**value, "type": of_role}
        if not isinstance(kind, str):
            raise ValueError(f"should be an object with a type, which is one of {', '.join(known)}")
        if kind not in known:
            raise ValueError(f"the type {kind[:40]!r} is not supported; supported are {', '.join(known)}")
        return value

    return BeforeValidator(check)


_RETRY_SECONDS = 2
SMALL_BYTES = 64 * 1024
_LARGE_SHARE = 0.75
"""The share of the budget that large bodies may use, so that slow uploads leave room for ordinary requests."""


class BodyBudget:
    """A counter of the bytes of all bodies, with a bound. Only for the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held = 0
        """The bytes of all bodies."""
        self._held_by_large = 0

    def lease(self) -> "BodyLease":
        """Return the share of one body, which is still empty."""
        return BodyLease(self)

    def take(self, before: int, count: int) -> None:
        """Count further bytes of a body that has ``before``. Raises Unavailable where they exceed the budget."""
        large = _large(before + count) - _large(before)
        over = self.held + count > self._max_bytes
        if over or (large and self._held_by_large + large > self._max_bytes * _LARGE_SHARE):
            raise Unavailable(
                f"the request bodies that this server is reading exceed {self._max_bytes} bytes "
                "(--body-memory); try again shortly",
                code="too_many_bodies",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self.held += count
        self._held_by_large += large

    def give_back(self, count: int) -> None:
        """Count the bytes of a body as free."""
        self.held -= count
        self._held_by_large -= _large(count)


def _large(count: int) -> int:
    return count if count > SMALL_BYTES else 0


class BodyLease:
    """The bytes of one body, which count until the end of the ``with`` block."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.give_back(self.num_bytes)
        self.num_bytes = 0

    def add(self, count: int) -> None:
        """Count further bytes. Raises Unavailable where they exceed the budget."""
        self._budget.take(self.num_bytes, count)
        self.num_bytes += count


Model = TypeVar("Model", bound=BaseModel)

_READ_SECONDS = 60.0
_SUBJECT = re.compile(r"^(?:Input|String|List|Dictionary) (?=should)")


_DOUBLE_DIGITS = 15
"""The length up to which the text of a number has no digits that its double lacks."""
_SCHEMAS = frozenset(("schema", "json_schema", "parameters", "input_schema", "json", "guided_json"))
"""The fields of bodies that contain a JSON schema, whose numbers keep all their digits."""
_LONG_NUMBER = re.compile(rb"[0-9][0-9.eE+-]{15,}")


def _number(text: str) -> int | float | Decimal:
    """Parse a JSON number; JSON has one kind of number, so 5.0 is the integer 5.

    A number with more digits than a double keeps becomes a Decimal, until ``_as_doubles`` knows its field.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("number out of range")
    if value.is_integer() and abs(value) <= 2**53 and value == Decimal(text):
        return int(value)
    return value if len(text) <= _DOUBLE_DIGITS or Decimal(repr(value)) == Decimal(text) else Decimal(text)


def _as_doubles(value: Any) -> Any:
    """Return a value of a body with doubles, as its fields expect them, outside JSON schemas."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, list):
        return [_as_doubles(each) for each in value]
    if isinstance(value, dict):
        return {name: each if name in _SCHEMAS else _as_doubles(each) for name, each in value.items()}
    return value


_decoder = msgspec.json.Decoder(float_hook=_number)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])

LARGE_BYTES = 128 * 1024
"""Work on a larger body is divided, or done in a thread, so that the event loop can serve others meanwhile."""
MAX_VALUES = 100_000
"""The most JSON values in a body, apart from arrays of token ids."""
MAX_TOKEN_IDS = 250_000
"""The most token ids in one array, unless the model's context holds more."""
_IDS_AT_ONCE = 50_000


async def read_object(
    request: Request, max_bytes: int, held: BodyLease, *, max_token_ids: int = MAX_TOKEN_IDS
) -> dict[str, Any]:
    """Return the JSON object in the body. Raises RequestError, and starlette's ClientDisconnect."""
    _check_media(request)
    try:
        async with asyncio.timeout(_READ_SECONDS):
            body = await _read(request, max_bytes, held)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {_READ_SECONDS:g} s") from None
    try:
        content = await _decode(body, max_token_ids)
        if _LONG_NUMBER.search(body):
            content = _as_doubles(content)
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"the body should be a JSON object, not {json_type(content)}", code="invalid_json")
    return content


async def _decode(body: bytes, max_token_ids: int) -> Any:
    """Decode a body. The time for which this blocks the event loop depends on the values, not on the bytes."""
    if len(body) <= LARGE_BYTES or _values(body) <= MAX_VALUES:
        return _decode_whole(body)
    left, content = MAX_VALUES, dict[str, Any]()
    for name, raw in _fields.decode(repaired(body)).items():
        text = bytes(raw)
        await asyncio.sleep(0)
        if _values(text) > MAX_VALUES and b'"' not in text and b"{" not in text:
            content[name] = await _token_ids(name, text, max_token_ids)
            continue
        left -= _values(text) if len(text) <= LARGE_BYTES else _values_outside_strings(text)
        if left < 0:
            raise InvalidRequest(
                f"{shortened(name, 100)}: the body has more than {MAX_VALUES} values", code="too_many_values"
            )
        await asyncio.sleep(0)
        content[name] = _decoder.decode(text)
    return content


def _values(text: bytes) -> int:
    """Return at least the number of values in a JSON text; commas and brackets in strings count as well."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _values_outside_strings(text: bytes) -> int:
    """Return the same without strings, or more than MAX_VALUES where there are too many strings."""
    if text.count(b'"') - text.count(b'\\"') > 2 * MAX_VALUES:
        return MAX_VALUES + 1
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return _values(b"".join(unescaped.split(b'"')[::2]))


async def _token_ids(name: str, text: bytes, most: int) -> Any:
    """Decode an array of token ids, or of such arrays, array by array."""
    if text.count(b"[") <= 1:
        if text.count(b",") >= most:
            raise InvalidRequest(f"{shortened(name, 100)}: an array has more than {most} items", code="too_many_values")
        return _decoder.decode(text)
    if text.count(b"[") > MAX_VALUES:
        raise InvalidRequest(f"{shortened(name, 100)}: has more than {MAX_VALUES} arrays", code="too_many_values")
    arrays, since = [], 0
    for raw in _items.decode(text):
        one = bytes(raw)
        if one.count(b"[") > 1 or one.count(b",") >= most:
            raise InvalidRequest(
                f"{shortened(name, 100)}: contains an array of arrays, or of more than {most} items",
                code="too_many_values",
            )
        arrays.append(_decoder.decode(one))
        since += one.count(b",") + 1
        if since > _IDS_AT_ONCE:
            since = 0
            await asyncio.sleep(0)
    return arrays


def _decode_whole(body: bytes) -> Any:
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError:
        text = repaired(body)
        if text is body:
            raise
        return _decoder.decode(text)


def _check_media(request: Request) -> None:
    # A web page may post other types to any address; to post JSON it needs the permission of that address (CORS).
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise UnsupportedMedia(f"content-type: should be application/json, not {shortened(media, 60) or 'absent'}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMedia(
            f"content-encoding: {shortened(encoding, 60)} is not supported; send the body without encoding"
        )


async def _read(request: Request, max_bytes: int, held: BodyLease) -> bytes:
    too_large = BodyTooLarge(f"the body is larger than {max_bytes} bytes (--max-body-bytes)")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise too_large
    parts = bytearray()
    async for part in request.stream():
        held.add(len(part))
        parts += part
        if len(parts) > max_bytes:
            raise too_large
    return bytes(parts)


async def validate_large_body(
    model: type[Model], content: dict[str, Any], *, lenient: bool, reasons: Sequence[str] = (), num_bytes: int
) -> Model:
    """Return the same as ``validate_body``, which a thread does for a large body."""
    if num_bytes <= LARGE_BYTES:
        return validate_body(model, content, lenient=lenient, reasons=reasons)
    return await asyncio.to_thread(validate_body, model, content, lenient=lenient, reasons=reasons)


def validate_body(model: type[Model], content: dict[str, Any], *, lenient: bool, reasons: Sequence[str] = ()) -> Model:
    """Return the validated object. Raises InvalidRequest with all reasons, after those that were found before."""
    details: list[ErrorDetails] = []
    try:
        body = model.model_validate(content)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    if lenient and unknown:
        for place in unknown:
            _log.warning("unknown field dropped (--lenient): %s", shortened(path_of(place), 100))
            _remove(content, place)
        return validate_body(model, content, lenient=False, reasons=reasons)
    if details or reasons:
        shown = [*reasons, *(_reason(detail, model) for detail in details[:MAX_REASONS])]
        message = joined_reasons(shown, total=len(reasons) + len(details))
        raise InvalidRequest(message, param=_top_field(shown[0]))
    return body


def _top_field(reason: str) -> str | None:
    """Return the top-level field of a reason: ``messages`` for ``messages[0].content: is required``."""
    field = re.match(r"\w+(?=[\[.:\w\]]*: )", reason)
    return field[0] if field else None


def _reason(detail: ErrorDetails, model: type[BaseModel]) -> str:
    place = shortened(path_of(detail["loc"]), 150)
    if detail["type"] == "extra_forbidden":
        near = get_close_matches(place, model.model_fields, n=1, cutoff=0.8)
        return f"{place}: unknown field" + (f"; did you mean {near[0]}?" if near else "")
    if detail["type"] == "missing":
        return f"{place}: is required"
    message = _SUBJECT.sub("", detail["msg"].removeprefix("Value error, "))
    return f"{place}: {message}" if place else message


def path_of(place: Sequence[int | str]) -> str:
    """Return a field's place as a path such as ``messages[0].content``."""
    path = ""
    for step in place:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _remove(content: Any, place: Sequence[int | str]) -> None:
    for step in place[:-1]:
        content = content[step]
    del content[place[-1]]


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the request body of a route for ``openapi_extra``, with its definitions inlined."""
    schema = model.model_json_schema(mode="validation")
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _inlined(schema, definitions)}},
        }
    }


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        rest = {name: value for name, value in node.items() if name != "$ref"}
        return _inlined({**target, **rest}, definitions)
    return {name: _inlined(value, definitions) for name, value in node.items()}
