"""Compilation of a constraint to a grammar of llguidance, and its trial.

This runs in the worker process of ``server.grammars``: llguidance has limits but no deadline, and a hostile grammar may
take any time and memory. What passes here is compiled again by ``matchers`` in the engine process.
"""

import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from quire_engine.grammar.negation import rewritten
from quire_engine.grammar.spec import GrammarError, GrammarSpec, Vocabulary, check_depth
from quire_engine.grammar.structural_tags import structural_tag_grammars

MAX_CHOICES = 4096
TRIAL_TOKENS = 32
MAX_MASK_SECONDS = 0.05
"""The processor time of one mask after the first, which a step of all other sequences may have to wait for."""

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""The limits of a grammar. A lexer state takes up to 2 kB: this is the memory of one sequence."""

WHITESPACE = r" |\r?\n[ \t]{0,20}"
"""The space between tokens of JSON, unless a request names another. It is bounded, because small models tend to write
space without end where they may."""

_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""The formats of strings that llguidance knows. All others are annotations, as the specification allows."""
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = f"([0-9]{{4}}-(0[13-9]|1[0-2])-[0-9]{{2}}|[0-9]{{4}}-02-([01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
_FRACTION = r"(\.[0-9]+)?"
_TIME = (
    f"([0-9]{{2}}:[0-9]{{2}}:[0-5][0-9]{_FRACTION}([zZ]|[+-][0-9]{{2}}:[0-9]{{2}})|23:59:60{_FRACTION}([zZ]|[+-]00:00))"
)
_FORMAT_PATTERNS = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}[tT]{_TIME}$"}
"""Patterns of what RFC 3339 requires beyond llguidance: a 29th of February has a leap year, and a leap second is
before midnight. Those with an offset from UTC are left out: a pattern would have to list each offset with its minute.
"""
_ONE = ("additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_ONE_MORE = ("unevaluatedItems", "unevaluatedProperties", "contentSchema")
_SUBSCHEMA = frozenset((*_ONE, *_ONE_MORE))
_SUBSCHEMA_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_SUBSCHEMA_MAPS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)


def make_tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """Return the vocabulary as llguidance reads it; for 150,000 tokens this takes most of a second."""
    return llguidance.LLTokenizer(
        _Tokens(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=list(vocabulary.eos_token_ids)
    )


class _Tokens(llguidance.TokenizerWrapper):
    """The tokens in the form that LLTokenizer reads."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        special = {token_id: name for name, token_id in vocabulary.special_tokens.items()}
        self.tokens = [
            special[token_id].encode() if token_id in special else token
            for token_id, token in enumerate(vocabulary.tokens)
        ]
        self.special_token_ids = sorted({*special, *vocabulary.eos_token_ids})

    def __call__(self, text: Any) -> list[int]:
        """Tokens are never forced, which alone would need the tokenizer's own way to cut a text."""
        return []


def compile_grammar(spec: GrammarSpec, vocabulary: Vocabulary, tokenizer: llguidance.LLTokenizer) -> str:
    """Return the grammar of a constraint for llguidance, after a trial. Raises GrammarError."""
    try:
        grammar = _WRITERS[spec.kind](spec, vocabulary)
    except (ValueError, GbnfToLarkError) as error:
        raise GrammarError(_shortened(str(error))) from error
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    try_grammar(grammar, tokenizer)
    return grammar


def _json_schema(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    schema = json.loads(spec.text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("it allows no value" if schema is False else "a JSON schema should be an object")
    check_depth(schema)
    return _wrapped({"json_schema": _prepared(schema, spec.whitespace_pattern)})


def _prepared(schema: dict[str, Any], whitespace_pattern: str | None = None) -> dict[str, Any]:
    """Return a schema with the options of llguidance: a keyword that it does not know is an error."""
    options = {"lenient": False, "coerce_one_of": False, **_space(whitespace_pattern)}
    return {**supported(schema), "x-guidance": options}


def _space(pattern: str | None) -> dict[str, Any]:
    """Return the options for the space between the tokens of JSON."""
    if pattern == "":
        return {"whitespace_flexible": False}
    return {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE if pattern is None else pattern}


def _regex(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    return _wrapped({"lark_grammar": f"start: /{llguidance.regex_to_lark(without_anchors(spec.text), '')}/"})


def _choice(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    choices = json.loads(spec.text)
    if len(choices) > MAX_CHOICES:
        raise GrammarError(f"it has {len(choices)} alternatives; at most {MAX_CHOICES} are accepted")
    return _wrapped({"lark_grammar": f"start: /{'|'.join(_regex_literal(choice) for choice in choices)}/"})


def _grammar(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    try:
        return _wrapped({"lark_grammar": any_to_lark(spec.text)})
    except Exception as error:
        if type(error) is Exception:  # the library raises it for a rule that is missing or named twice
            raise GrammarError(_shortened(str(error))) from error
        raise


def _structural_tag(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    tag = json.loads(spec.text)
    check_depth(tag)
    return _wrapped(*structural_tag_grammars(tag, vocabulary.special_tokens, _prepared))


_WRITERS: dict[str, Callable[[GrammarSpec, Vocabulary], str]] = {
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}


def _wrapped(content: dict[str, Any], *others: dict[str, Any]) -> str:
    """Return grammars as one, whose start is ``content``.

    With ``no_forcing`` a text that must follow may be cut into tokens in any way: the model chooses, as it does
    elsewhere.
    """
    start = {"name": "answer", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: @content\n'}
    return json.dumps({"grammars": [start, {"name": "content", **content}, *others]})


def try_grammar(grammar: str, tokenizer: llguidance.LLTokenizer) -> None:
    """Compile a grammar and follow it for a few tokens. Raises GrammarError where it is invalid or allows no text."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(_shortened(matcher.get_error()))
    generator = random.Random(0)
    for number in range(TRIAL_TOKENS):
        began = time.thread_time()
        mask = matcher.compute_bitmask()
        token_id = _any_bit(mask, generator)
        if token_id is None or matcher.is_error() or matcher.stop_reason() == "NoExtensionBias":
            raise GrammarError("it allows no text, or is too complex")
        if number and time.thread_time() - began > MAX_MASK_SECONDS:
            raise GrammarError("it is too complex: finding the tokens that it allows takes too long")
        if not matcher.consume_token(token_id) or matcher.is_stopped():
            return


def _any_bit(mask: bytes, generator: random.Random) -> int | None:
    """Return one of the tokens that a mask allows; None for an empty mask."""
    places = [place for place, byte in enumerate(mask) if byte]
    if not places:
        return None
    place = generator.choice(places)
    return place * 8 + generator.choice([bit for bit in range(8) if mask[place] >> bit & 1])


def supported(schema: Any) -> Any:
    """Return a schema in keywords of llguidance where that is possible.

    Formats that only describe a string, such as ``password``, are left out, as are ``then`` and ``else`` without an
    ``if``, which the specification ignores; ``negation`` rewrites others.
    """
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ("then", "else") and "if" not in schema:
            continue
        if name == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if name in _SUBSCHEMA_LISTS and isinstance(value, list):
            value = [supported(each) for each in value]
        elif name in _SUBSCHEMA_MAPS and isinstance(value, dict):
            value = {key: supported(each) for key, each in value.items()}
        elif name in _SUBSCHEMA:
            value = supported(value)
        kept[name] = value
    return rewritten(_with_real_dates(kept))


def _with_real_dates(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with the pattern of its format, if the format has one."""
    name, others = schema.get("format"), schema.get("allOf", [])
    if not isinstance(name, str) or name not in _FORMAT_PATTERNS or not isinstance(others, list):
        return schema
    required = {"pattern": _FORMAT_PATTERNS[name]}
    return {**schema, "allOf": [*others, required]} if "pattern" in schema else {**schema, **required}


def without_anchors(pattern: str) -> str:
    """Return a pattern without the anchors at its ends: it always matches the whole answer."""
    pattern = pattern.removeprefix("^")
    ended = re.search(r"(\\*)\$\Z", pattern)
    return pattern[:-1] if ended is not None and len(ended[1]) % 2 == 0 else pattern


def _regex_literal(text: str) -> str:
    return re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text)


def _shortened(message: str) -> str:
    """Return the reason that llguidance gives, in one line of bounded length."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and set(line.strip()) != {"^"}]
    text = " ".join(lines)[:500]
    if keys := re.search(r"Unimplemented keys: \[([^\]]*)\]", text):
        return f"the keyword {keys[1]} is not supported"
    return text
