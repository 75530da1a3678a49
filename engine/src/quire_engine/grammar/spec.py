"""The constraint of an answer as a request names it: a pure value, before anything is parsed.

A route gets it from ``response_format``, ``structured_outputs`` or its tools, ``server.grammars`` compiles it in a
worker process, and the engine process gets the result as ``SamplingParams.grammar``.
"""

from dataclasses import dataclass
from typing import Any, Literal

MAX_DEPTH = 64
"""The deepest nesting of a JSON schema; llguidance's own parser ends at 128 levels of JSON."""

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """A constraint of an answer.

    ``server.openai.requests.validate`` compiles the one that it is given, and puts it into the sampling parameters of
    every answer to the request.

    ============== =====================================================================================
    kind           text
    ============== =====================================================================================
    json_schema    a JSON schema, as JSON: the answer is one instance of it; ``{"type": "object"}`` is any object
    regex          a regular expression in the syntax of Rust's regex crate, which the whole answer matches
    choice         a JSON array of strings: the answer is one of them
    grammar        a context-free grammar in Lark's or llama.cpp's notation (GBNF, EBNF)
    structural_tag free text with constrained parts, as JSON in vLLM's two shapes (see ``structural_tags``)
    ============== =====================================================================================
    """

    kind: GrammarKind
    text: str
    param: str
    """The path of the field of the request, which a refusal names."""
    whitespace_pattern: str | None = None
    """A regular expression of the space between the tokens of JSON; empty allows none, None a space or a line."""

    @property
    def field(self) -> str:
        """The field of the request itself."""
        return self.param.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of a model as bytes; the place of a token is its id."""

    tokens: list[bytes]
    """As many as the model has logits; empty for an id without a text."""
    special_tokens: dict[str, int]
    """Tokens that no text contains, by name: a grammar allows them only where it names them."""
    eos_token_ids: tuple[int, ...]
    """The tokens that end an answer: a grammar allows them where it may end."""


class GrammarError(Exception):
    """A grammar that cannot be compiled; the message says why, without the field of the request."""


def check_depth(value: Any) -> None:
    """Raise GrammarError for JSON that is nested too deeply for functions that call themselves at each level."""
    if (depth := json_depth(value)) > MAX_DEPTH:
        raise GrammarError(f"it is nested {depth} deep; at most {MAX_DEPTH} levels are accepted")


def json_depth(value: Any) -> int:
    """Return how deep objects and arrays are nested; without recursion, because a client chooses the depth."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth
