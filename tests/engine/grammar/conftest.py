"""Engines over the fake runner whose sequences follow grammars; one token a byte."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import llguidance
import pytest
from fake_runner import FakeRunner

from quire_engine.core.batch import FinishedSequence
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.options import ModelTraits, PreemptionMode, SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.sequence import Request
from quire_engine.core.speculation.speculation import Speculation
from quire_engine.engine import Engine
from quire_engine.grammar.compiler import LIMITS, compile_grammar, make_tokenizer
from quire_engine.grammar.matchers import Matchers
from quire_engine.grammar.spec import GrammarKind, GrammarSpec, Vocabulary

EOS, OTHER_EOS = 256, 257
VOCAB_SIZE = 300
BYTES = Vocabulary(
    tokens=[bytes([byte]) for byte in range(256)], special_tokens={"<|end|>": EOS}, eos_token_ids=(EOS, OTHER_EOS)
)
_PADDED = replace(BYTES, tokens=[*BYTES.tokens, *[b""] * (VOCAB_SIZE - 256)])
_TOKENIZER = make_tokenizer(_PADDED)


def compiled(kind: GrammarKind, text: str) -> str:
    return compile_grammar(GrammarSpec(kind=kind, text=text, param="p"), _PADDED, _TOKENIZER)


@dataclass
class Constrained:
    """An engine, and what its sequences have said so far."""

    engine: Engine
    matchers: Matchers
    woken: threading.Semaphore
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishedSequence] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, key: int, params: SamplingParams, prompt: str = "Hi", parent: int | None = None) -> None:
        request = Request(key=key, prompt_token_ids=list(prompt.encode()), params=params, seed=key, parent=parent)
        assert self.engine.add(request) is None

    def wait_for_grammars(self, count: int = 1) -> None:
        for _ in range(count):
            self.woken.acquire()
        self.engine.add_prepared()

    def step(self) -> None:
        step = self.engine.step()
        self.engine.check_integrity()
        self.failed |= self.engine.take_failed()
        if step is not None:
            for key, token_id in zip(step.keys, step.token_ids, strict=True):
                self.tokens.setdefault(key, []).append(token_id)
            self.finished |= {each.key: each for each in step.finished}

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def text(self, key: int) -> str:
        return bytes(each for each in self.tokens[key] if each < 256).decode()


def make_constrained(
    *,
    overlap: bool = False,
    num_blocks: int = 200,
    num_swap_blocks: int = 0,
    preemption_mode: PreemptionMode = "auto",
    caching: bool = True,
    speculation: Speculation | None = None,
) -> Constrained:
    group = KVCacheGroup(layers=(0,), num_blocks=num_blocks, num_swap_blocks=num_swap_blocks)
    layout = KVCacheLayout(block_size=4, groups=(group,))
    options = SchedulerOptions(
        max_num_seqs=8,
        max_num_batched_tokens=32,
        preemption_mode=preemption_mode,
        enable_prefix_caching=caching,
    )
    woken = threading.Semaphore(0)
    matchers = Matchers(VOCAB_SIZE, woken.release)
    matchers.set_vocabulary(BYTES)
    runner = FakeRunner(layout=layout, vocab_size=VOCAB_SIZE)
    scheduler = Scheduler(
        options, ModelTraits(max_model_len=400, eos_token_ids=(EOS, OTHER_EOS)), layout, speculation=speculation
    )
    engine = Engine(scheduler=scheduler, runner=runner, matchers=matchers, overlap=overlap)
    return Constrained(engine, matchers, woken)


@pytest.fixture(scope="session", name="make_constrained")
def make_constrained_fixture() -> Callable[..., Constrained]:
    return make_constrained


@pytest.fixture(scope="session", name="grammar")
def grammar_fixture() -> Callable[[GrammarKind, str], str]:
    return compiled


@pytest.fixture(scope="session")
def accepts() -> Callable[[str, str], bool]:
    """Return the function that decides whether a grammar accepts a text as a whole answer."""

    def accepts(grammar: str, text: str) -> bool:
        matcher = llguidance.LLMatcher(_TOKENIZER, grammar, log_level=0, limits=LIMITS)
        return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())

    return accepts


@pytest.fixture(scope="session")
def random_answer() -> Callable[[str, random.Random, int], str | None]:
    """Return the function that samples an answer; None for one that has not ended after a number of bytes."""

    def answer(grammar: str, generator: random.Random, limit: int) -> str | None:
        matcher = llguidance.LLMatcher(_TOKENIZER, grammar, log_level=0, limits=LIMITS)
        text = bytearray()
        while len(text) < limit:
            mask = matcher.compute_bitmask()
            allowed = [token for token in range(258) if mask[token // 8] >> token % 8 & 1]
            assert allowed, "the grammar allows no token"
            token = EOS if EOS in allowed and generator.random() < 0.3 else generator.choice(allowed)
            if token >= EOS:
                return text.decode()
            assert matcher.consume_token(token)
            text.append(token)
        return None

    return answer
