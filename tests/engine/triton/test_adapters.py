"""Adapters on the device runner: launch by launch and in captured graphs, requests get their merged model's answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from adapter_support.engines import answers, started
from adapter_support.folders import linear_shapes, make_adapter, merge, of_kinds
from quire_parity import cases
from quire_parity.cases import Case
from quire_parity.reference import Answer, Tally, compare, generate, load_reference

from quire_engine.core.batch import Admission
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.runner.profiling import largest_step
from quire_kernels.dispatch import INTERPRETED

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LENGTHS = (3, 18, 7)
SHORT = 3
DEVICE = "cpu" if INTERPRETED else "cuda"
GRAPHS: dict[str, dict[str, Any]] = {
    "launch by launch": {"enforce_eager": True},
    "captured, padded": {"enforce_eager": False, "cudagraph_capture_sizes": (4,)},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a model, two adapters of different ranks and modules, and the model merged with each."""
    home = tmp_path_factory.mktemp("adapted")
    base = home / "base"
    cases.save(Case(family="llama", fields={"num_hidden_layers": 1, "head_dim": 32}), base)
    shapes = linear_shapes(base)
    adapters = [
        make_adapter(home / "all", of_kinds(shapes, ALL), seed=1, rank=11, std=0.2),
        make_adapter(home / "some", of_kinds(shapes, ("k_proj", "down_proj")), seed=2, rank=4, std=0.3),
    ]
    return [base, *adapters, *(merge(base, adapter, home / f"merged-{adapter.name}") for adapter in adapters)]


@pytest.fixture(scope="module")
def expected(folders: Sequence[Path]) -> list[list[Answer]]:
    """Return transformers' answers by the number of the adapter, 0 for the base, and by prompt."""
    models = [load_reference(folder, "eager") for folder in (folders[0], *folders[3:])]
    return [[beginning(generate(model, prompt)) for prompt in cases.prompts(LENGTHS)] for model in models]


def beginning(answer: Answer) -> Answer:
    return Answer(token_ids=answer.token_ids[:SHORT], logprobs=answer.logprobs[:SHORT], gaps=answer.gaps[:SHORT])


@pytest.mark.parametrize("graphs", GRAPHS.values(), ids=list(GRAPHS))
def test_a_mixed_batch_gets_the_answers_of_merged_models(
    folders: Sequence[Path], expected: list[list[Answer]], graphs: dict[str, Any]
) -> None:
    assert len({str([answer.token_ids for answer in own]) for own in expected}) == 3
    prompts = cases.prompts(LENGTHS)
    engine = started(folders[0], adapters=folders[1:3], sequences=4, step_tokens=16, device=DEVICE, **graphs)
    asked = {0: (prompts[0], 1), 1: (prompts[1], None), 2: (prompts[2], 2)}
    heard = answers(engine, asked, max_tokens=SHORT)
    engine.close()
    for key, (_, adapter) in asked.items():
        compare(expected[adapter or 0][key], heard[key].token_ids, heard[key].logprobs, Tally(), f"request {key}")


def test_a_slot_is_used_by_one_adapter_after_another(folders: Sequence[Path], expected: list[list[Answer]]) -> None:
    """A captured graph finds the second adapter where the first one was, and then none."""
    prompt = cases.prompts(LENGTHS)[0]
    graphs = {"enforce_eager": False, "cudagraph_capture_sizes": (1,)}
    engine = started(folders[0], slots=1, adapters=folders[1:3], sequences=1, step_tokens=16, device=DEVICE, **graphs)
    for key, adapter in enumerate((1, 2, None, 1)):
        heard = answers(engine, {key: (prompt, adapter)}, max_tokens=SHORT)[key]
        compare(expected[adapter or 0][0], heard.token_ids, heard.logprobs, Tally(), f"adapter {adapter}")
    engine.close()


@pytest.mark.parametrize(("slots", "used"), [(0, [-1, -1, -1]), (2, [0, 1, 0])])
def test_the_profiled_step_uses_every_slot(slots: int, used: list[int]) -> None:
    layout = KVCacheLayout(block_size=16, groups=(KVCacheGroup(layers=(0,), num_blocks=4, window=None),))
    batch = largest_step(layout, sequences=3, tokens=9, max_model_len=8, vocab_size=10, logprobs=0, adapter_slots=slots)
    admitted: list[Admission] = list(batch.admitted)
    assert [admission.adapter_slot for admission in admitted] == used
