"""Ranks on GPUs: they answer as one process does. In Triton's interpreter they exchange data by gloo.

Nodes of a group are all on this machine. On real GPUs they need a network namespace and GPUs each, so they are for the
interpreter only.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_drafts import use_every_draft
from quire_parity import cases
from quire_parity.cases import Case

from quire_cluster.ports import free_ports
from quire_engine.config import (
    CacheOptions,
    DeviceOptions,
    EngineConfig,
    ModelOptions,
    ParallelOptions,
    ServerOptions,
    SpeculationOptions,
)
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import make_engine
from quire_engine.runner import load_model
from quire_engine.runner.parallel.node import Node
from quire_kernels.dispatch import INTERPRETED

ONE, TWO = ParallelOptions(), ParallelOptions(tensor=2)
PROMPTS = ([5, 6, 5, 5, 6, 6, 5], [40, 41, 42])
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2, allowed_token_ids=(5, 6))
SAMPLED = SamplingParams(max_tokens=3, temperature=0.9, top_p=0.9, repetition_penalty=1.2, ignore_eos=True, logprobs=2)
NGRAM = SpeculationOptions(max_tokens=2, shortest_match=1)
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "head_dim": 32, "vocab_size": 251}
"""The vocabulary has an odd size, so that the ranks have shares of different sizes."""
EXPERTS = Case(family="mixtral", fields={**ONE_LAYER, "num_local_experts": 4, "num_experts_per_tok": 2})


@pytest.fixture(autouse=True)
def _enough_gpus() -> None:
    if not INTERPRETED and torch.cuda.device_count() < 2:
        pytest.skip("ranks need a GPU each, and there is one")


def config_of(folder: Path, parallel: ParallelOptions = ONE) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(path=folder, dtype="float32", max_model_len=32),
        cache=CacheOptions(kv_cache_memory_bytes=1 << 19),
        scheduler=SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=6),
        server=ServerOptions(),
        device=DeviceOptions(device="cpu" if INTERPRETED else "cuda"),
        parallel=parallel,
        threads=1,
    )


def answers(config: EngineConfig) -> tuple[list[list[int]], list[list[float]], int]:
    """Return the tokens and logprobs of a greedy and a sampled request, and the bytes of the weights.

    With speculation, all possible drafts are used.
    """
    model = load_model(config)
    assert model.asynchronous is (config.parallel.pipeline == 1) and model.traits.stages == config.parallel.pipeline
    engine = make_engine(model, scheduler=config.scheduler, speculation=config.speculation)
    if config.speculation is not None:
        use_every_draft(engine._scheduler._speculation)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    logprobs: list[list[float]] = [[] for _ in PROMPTS]
    try:
        for key, (prompt, params) in enumerate(zip(PROMPTS, (GREEDY, SAMPLED), strict=True)):
            assert engine.add(Request(key=key, prompt_token_ids=prompt, params=params, seed=key)) is None
        while engine.has_work:
            if (step := engine.step()) is None:
                continue
            for place, key in enumerate(step.keys):
                tokens[key].append(step.token_ids[place])
                assert step.logprobs is not None and (entry := step.logprobs[place]) is not None
                logprobs[key] += entry.logprobs
        assert bool(engine.counters.draft_tokens) == (config.speculation is not None)
    finally:
        engine.close()
    return tokens, logprobs, model.model_bytes


def test_two_ranks_answer_as_one_process(tmp_path: Path) -> None:
    """They sum the experts, and verify drafts."""
    cases.save(EXPERTS, tmp_path)
    alone = answers(config_of(tmp_path))
    shared = answers(replace(config_of(tmp_path, TWO), speculation=NGRAM))
    assert shared[0] == alone[0]
    for found, expected in zip(shared[1], alone[1], strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    assert shared[2] < 1.1 * alone[2]


TWO_LAYERS = Case(family="llama", fields={**ONE_LAYER, "num_hidden_layers": 2})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A model of two layers, and the answers of one process."""

    folder: Path
    answers: tuple[list[list[int]], list[list[float]], int]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("two-layers")
    cases.save(TWO_LAYERS, folder)
    return Reference(folder=folder, answers=answers(config_of(folder)))


@contextmanager
def other_nodes(config: EngineConfig) -> Iterator[None]:
    """Run the nodes of a group other than node 0."""
    with ExitStack() as ending, ThreadPoolExecutor() as pool:

        def run(number: int) -> None:
            parallel = replace(config.parallel, node_rank=number)
            ending.callback(Node(replace(config, parallel=parallel), wake=lambda: None).close)

        # Each thread, which a rank does not outlive, stays until all nodes are closed.
        started = [pool.submit(run, number) for number in range(1, config.parallel.nodes)]
        yield
        for node in started:
            node.result()
        ending.close()


@pytest.mark.parametrize(
    "parallel",
    [ParallelOptions(pipeline=2), ParallelOptions(tensor=2, pipeline=2, nodes=4)],
    ids=["stages", "a rank on each of four nodes"],
)
def test_stages_and_nodes_answer_as_one_process(
    parallel: ParallelOptions, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not INTERPRETED and parallel.nodes > 1:
        pytest.skip("several nodes need GPUs each")
    monkeypatch.setenv("QUIRE_GROUP_SECRET", "the secret of this test")
    (port,) = free_ports(1)
    config = replace(config_of(reference.folder, replace(parallel, master_port=port)), speculation=NGRAM)
    with other_nodes(config):
        shared = answers(config)
    assert shared[0] == reference.answers[0]
    for found, expected in zip(shared[1], reference.answers[1], strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
