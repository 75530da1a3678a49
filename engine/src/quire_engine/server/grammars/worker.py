"""A worker process that compiles grammars: ``python -m quire_engine.server.grammars.worker``.

Its frames are a ``GrammarSetup`` and then ``Task`` after ``Task``, each of which is answered by one ``Compiled``. The
server kills a worker that takes too long, because no signal interrupts llguidance.
"""

from collections.abc import Callable

import msgspec

from quire_engine.grammar.compiler import compile_grammar, make_tokenizer
from quire_engine.grammar.spec import GrammarError
from quire_engine.server.grammars.messages import Compiled, GrammarSetup, Task
from quire_engine.server.workers.child import answer_frames, bound_memory


def main() -> None:
    """Answer grammars until the input ends."""
    answer_frames(_set_up, ready=Compiled())


def _set_up(message: bytes) -> Callable[[bytes], Compiled]:
    setup = msgspec.json.decode(message, type=GrammarSetup)
    tokenizer = make_tokenizer(setup.vocabulary)
    bound_memory(setup.memory_bytes)

    def compiled(task: bytes) -> Compiled:
        spec = msgspec.json.decode(task, type=Task).spec
        try:
            return Compiled(grammar=compile_grammar(spec, setup.vocabulary, tokenizer))
        except GrammarError as error:
            return Compiled(reason=str(error))
        except MemoryError:
            return Compiled(reason="it needs too much memory")

    return compiled


if __name__ == "__main__":
    main()
