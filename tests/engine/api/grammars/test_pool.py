"""Grammars are compiled by worker processes, within bounds, and a hostile one is refused in time."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire_engine.api.grammars import MAX_TEXT_CHARACTERS, GrammarLimits, GrammarPool
from quire_engine.api.worker_process import WorkerTooSlow
from quire_engine.errors import InvalidRequest
from quire_engine.grammar.spec import GrammarKind, GrammarSpec, Vocabulary

BYTES = Vocabulary(
    tokens=[bytes([byte]) for byte in range(256)] + [b""], special_tokens={"<|end|>": 256}, eos_token_ids=(256,)
)
PATIENT = GrammarLimits(wall_seconds=30.0)


def spec(kind: GrammarKind, value: Any) -> GrammarSpec:
    return GrammarSpec(kind=kind, text=value if isinstance(value, str) else json.dumps(value), param="p")


@asynccontextmanager
async def pool_of(limits: GrammarLimits = PATIENT, vocabulary: Vocabulary | None = BYTES) -> AsyncIterator[GrammarPool]:
    pool = GrammarPool(limits)
    pool.set_vocabulary(vocabulary)
    try:
        yield pool
    finally:
        await pool.close()


async def refused(pool: GrammarPool, wanted: GrammarSpec) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await pool.compile(wanted)
    assert caught.value.param == "p" and caught.value.message.startswith("p: ")
    return caught.value


async def test_a_grammar_is_compiled_or_refused_with_its_reason() -> None:
    async with pool_of() as pool:
        grammar = await pool.compile(spec("json_schema", {"type": "integer"}))
        assert json.loads(grammar)["grammars"]
        assert await pool.compile(spec("json_schema", {"type": "integer"})) is grammar
        error = await refused(pool, spec("json_schema", {"not": {"pattern": "a"}}))
        assert error.code == "invalid_grammar" and '"not"' in error.message


HOSTILE = [
    spec("json_schema", {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(4000)}}),
    spec("regex", "|".join("a" * n for n in range(480))),
    spec("json_schema", {"enum": ["x" * 9 + str(n) for n in range(6000)]}),
    spec("json_schema", {"allOf": [{"anyOf": [{"required": [f"p{n}"]}, {"required": [f"q{n}"]}]} for n in range(30)]}),
    spec("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    spec("regex", "(" * 50_000 + "a" + ")" * 50_000),
    spec("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000),
    spec("structural_tag", '{"format":' * 10_000 + "{}" + "}" * 10_000),
    spec("choice", [str(number) for number in range(12_000)]),
]


async def test_hostile_grammar_is_compiled_or_refused_alone() -> None:
    async with pool_of(GrammarLimits()) as pool:
        await pool.compile(spec("choice", ["a"]))  # the workers are there
        for hostile in HOSTILE:
            try:
                await pool.compile(hostile)
            except InvalidRequest as error:
                assert error.code == "invalid_grammar"
        assert await pool.compile(spec("choice", ["a", "b"]))


async def test_a_grammar_that_takes_too_long_is_refused() -> None:
    async with pool_of(GrammarLimits(wall_seconds=0.0001)) as pool:
        error = await refused(pool, spec("choice", ["a"]))
        assert error.code == "invalid_grammar" and "0.0001 s" in error.message


async def test_a_grammar_that_took_too_long_is_tried_again_later() -> None:
    """The machine may have been busy: the refusal holds for a few seconds only. Other results hold on."""
    now = 100.0
    slow, wrong = spec("choice", ["a"]), spec("json_schema", {"not": {"pattern": "a"}})
    pool = GrammarPool(PATIENT, lambda: now)
    pool._known.set()
    answers: list[bytes | Exception] = []
    asked = 0

    class Worker:
        async def ask(self, task: bytes) -> bytes:
            nonlocal asked
            asked += 1
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    worker: Any = Worker()
    pool._workers.append(worker)
    pool._idle.put_nowait(worker)
    answers += [WorkerTooSlow(), b'{"grammar": "g"}', b'{"reason": "no"}']
    for _ in range(2):
        assert "takes more than" in (await refused(pool, slow)).message
    assert asked == 1
    now += 6.0
    assert await pool.compile(slow) == "g"
    await refused(pool, wrong)
    now += 1e6
    assert await pool.compile(slow) == "g" and "no" in (await refused(pool, wrong)).message
    assert asked == 3


async def test_a_text_that_is_too_long_needs_no_worker() -> None:
    pool = GrammarPool()
    error = await refused(pool, spec("json_schema", {"enum": [f"value {number}" for number in range(1_000_000)]}))
    assert error.code == "grammar_too_large" and str(MAX_TEXT_CHARACTERS) in error.message


async def test_a_model_without_token_bytes_refuses_grammars() -> None:
    async with pool_of(vocabulary=None) as pool:
        assert (await refused(pool, spec("choice", ["a"]))).code == "grammar_unsupported"
