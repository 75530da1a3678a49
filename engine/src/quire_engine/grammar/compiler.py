"""Compilation of a constraint to a grammar of llguidance, and its trial.

This runs in the worker process of ``server.grammars``: llguidance has limits but no deadline, and a hostile grammar may
take any time and memory. What passes here is compiled again by ``matchers`` in the engine process.
"""

import json
import random
import re
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from quire_engine.grammar.json_lark import json_grammar
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


class _Rejected(GrammarError):
    """A grammar that llguidance does not compile; the message is its reason."""


def compile_grammar(spec: GrammarSpec, vocabulary: Vocabulary, tokenizer: llguidance.LLTokenizer) -> str:
    """Return the grammar of a constraint for llguidance, after a trial. Raises GrammarError."""
    try:
        grammar = _WRITERS[spec.kind](spec, vocabulary)
    except (ValueError, ArithmeticError, GbnfToLarkError) as error:
        raise GrammarError(_shortened(str(error))) from error
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    try:
        try_grammar(grammar, tokenizer)
    except _Rejected as error:
        # The grammar of a schema is our own: the reason is a limit, in words about what no client has written.
        if spec.kind == "json_schema":
            raise GrammarError("it is too complex") from error
        raise
    return grammar


def _json_schema(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    schema = _decoded(spec.text)
    if not isinstance(schema, dict | bool):
        raise GrammarError("a JSON schema should be an object")
    return _wrapped({"lark_grammar": json_grammar(schema, spec.whitespace_pattern)})


def _decoded(text: str) -> Any:
    """Return JSON with its numbers as they are written. Raises GrammarError for JSON that is nested too deeply."""
    value = json.loads(text, parse_float=Decimal)
    check_depth(value)
    return value


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
    return _wrapped(*structural_tag_grammars(_decoded(spec.text), vocabulary.special_tokens))


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
        raise _Rejected(_shortened(matcher.get_error()))
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
    return " ".join(lines)[:500]
