"""Grammars compiled in the process of a test, without workers and bounds."""

from quire_engine.errors import InvalidRequest
from quire_engine.grammar.compiler import compile_grammar, make_tokenizer
from quire_engine.grammar.spec import GrammarError, GrammarSpec
from quire_engine.text.tokenizer import Tokenizer


class InlineGrammars:
    """A GrammarCompiler for the tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        vocabulary = tokenizer.vocabulary(tokenizer.vocab_size, eos_token_ids)
        assert vocabulary is not None
        self._vocabulary = vocabulary
        self._tokenizer = make_tokenizer(vocabulary)
        self.specs: list[GrammarSpec] = []

    async def compile(self, spec: GrammarSpec) -> str:
        """Return the grammar of a constraint."""
        self.specs.append(spec)
        try:
            return compile_grammar(spec, self._vocabulary, self._tokenizer)
        except GrammarError as error:
            raise InvalidRequest(f"{spec.param}: cannot be compiled: {error}", param=spec.field) from error
