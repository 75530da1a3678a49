"""Ranks that share a model: they answer as one process does, and they live and end together."""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from process_ends import process_ends

from quire_cluster.ports import free_ports
from quire_common.errors import FlagsError
from quire_engine.config import (
    AdapterOptions,
    EngineConfig,
    EngineProcessOptions,
    ParallelOptions,
    PoolingSetup,
    SpeculationOptions,
)
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.errors import EngineStartError, Unavailable
from quire_engine.ipc.client import EngineClient
from quire_engine.runner import load_model

VOCABULARY = 250
TWO = ParallelOptions(tensor=2)
STAGES = ParallelOptions(pipeline=2)
Config = Callable[..., EngineConfig]
Folder = Callable[..., Path]


def prompts(count: int = 6) -> list[list[int]]:
    numbers = random.Random(3)
    return [[numbers.randrange(3, VOCABULARY) for _ in range(5 + 13 * place)] for place in range(count)]


def answer(running: Any, params: list[SamplingParams], *, together: bool = True) -> tuple[dict[int, Any], ...]:
    """Return tokens, logprobs and prompt logprobs of one request per parameter set."""
    for key, (prompt, one) in enumerate(zip(prompts(len(params)), params, strict=True)):
        running.add(key, prompt, one, seed=key)
        if not together:
            running.finish()
    running.finish()
    running.engine.close()
    return running.tokens, running.logprobs, running.prompt_logprobs


SAMPLED = SamplingParams(max_tokens=8, temperature=0.9, ignore_eos=True, logprobs=3)
EVERY = [
    SAMPLED,
    replace(SAMPLED, top_p=0.8, top_k=20),
    replace(SAMPLED, min_p=0.05, repetition_penalty=1.2),
    replace(SAMPLED, presence_penalty=0.5, frequency_penalty=0.4, temperature=0.0),
    replace(SAMPLED, logit_bias=((5, 3.0), (9, -100.0)), prompt_logprobs=2),
    replace(SAMPLED, allowed_token_ids=(3, 4, 5, 6), temperature=0.0),
]


@pytest.mark.parametrize("parallel", [TWO, STAGES], ids=["tensor", "stages"])
def test_ranks_sample_the_same_tokens_as_one_process(
    make_folder: Folder, start: Callable[..., Any], parallel: ParallelOptions
) -> None:
    folder = make_folder()
    alone = answer(start(folder), EVERY)
    shared = answer(start(folder, parallel=parallel), EVERY)
    assert shared[0] == alone[0]
    for found, expected in zip(shared[1:], alone[1:], strict=True):
        for key, entries in expected.items():
            for one, other in zip(found[key], entries, strict=True):
                assert one.token_ids == other.token_ids
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_deterministic_answers_do_not_depend_on_the_batch(make_folder: Folder, start: Callable[..., Any]) -> None:
    folder = make_folder("qwen3", head_dim=24)
    options = {"parallel": TWO, "deterministic": True, "enable_prefix_caching": False}
    chunks = SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=17)
    alone = answer(start(folder, **options), EVERY, together=False)
    assert answer(start(folder, **options, scheduler=chunks), EVERY) == alone


@pytest.mark.slow
def test_deterministic_answers_are_the_same_in_stages(make_folder: Folder, start: Callable[..., Any]) -> None:
    """Bit for bit: the stages compute in the same order as one process."""
    folder = make_folder("qwen3", head_dim=24)
    alone = answer(start(folder, deterministic=True), EVERY)
    assert answer(start(folder, deterministic=True, parallel=STAGES), EVERY) == alone


@pytest.mark.parametrize(
    "parallel", [pytest.param(TWO, id="tensor"), pytest.param(STAGES, id="stages", marks=pytest.mark.slow)]
)
def test_ngram_drafts_change_no_token(
    make_folder: Folder, start: Callable[..., Any], parallel: ParallelOptions
) -> None:
    folder = make_folder()
    params = [replace(SAMPLED, temperature=0.0, max_tokens=30, logprobs=None)] * 4
    ngram = SpeculationOptions(max_tokens=4, shortest_match=1, longest_match=2)
    alone = answer(start(folder), params)[0]
    assert answer(start(folder, parallel=parallel, speculation=ngram), params)[0] == alone


def test_ranks_share_the_weights(make_folder: Folder, engine_config: Config, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_folder(tie_word_embeddings=True)
    alone = load_model(engine_config(folder))
    with caplog.at_level("INFO"):
        shared = load_model(engine_config(folder, parallel=TWO))
    shared.runner.close()
    norms = 5 * 64 * 4  # all ranks have them
    assert shared.model_bytes == alone.model_bytes + norms
    assert "on 2 ranks" in caplog.text


@pytest.mark.parametrize(
    ("changes", "parallel", "part"),
    [
        ({}, ParallelOptions(tensor=3), "--tensor-parallel-size 3 does not divide the model's 4 attention heads"),
        ({"intermediate_size": 97}, TWO, "does not divide 97 (intermediate_size)"),
        ({}, ParallelOptions(pipeline=3), "--pipeline-parallel-size 3 does not divide the model's 2 layers"),
    ],
)
def test_sizes_that_do_not_fit_stop_the_start(
    make_folder: Folder, engine_config: Config, changes: dict[str, Any], parallel: ParallelOptions, part: str
) -> None:
    config = engine_config(make_folder(**changes), parallel=parallel)
    with pytest.raises(FlagsError) as caught:
        load_model(config)
    assert any(part in problem for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"adapters": AdapterOptions(enabled=True)}, "--enable-lora exclude each other"),
        ({"pooling": PoolingSetup(hidden_size=64)}, "this one pools"),
        (
            {"speculation": SpeculationOptions(method="draft_model", model=Path("d"), required=False)},
            "--spec-model exclude each other",
        ),
    ],
)
def test_options_unsupported_by_ranks_are_refused(
    make_folder: Folder, engine_config: Config, change: dict[str, Any], part: str
) -> None:
    config = replace(engine_config(make_folder(), parallel=TWO), **change)
    with pytest.raises(FlagsError) as caught:
        load_model(config)
    assert any(part in problem for problem in caught.value.problems)


def test_models_of_transformers_are_refused(make_folder: Folder, engine_config: Config) -> None:
    with pytest.raises(FlagsError) as caught:
        load_model(engine_config(make_folder(), parallel=TWO, model_impl="transformers"))
    assert any("quire's own model families" in problem for problem in caught.value.problems)


def test_rank_that_cannot_load_ends_the_start(
    make_folder: Folder, engine_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank's weights are damaged where only it reads them: rank 0 reports its words, and no process stays."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    source = make_folder()
    folder = source.parent / f"{source.name}-damaged"
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][-1, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineStartError, match=r"rank 1 of 2: .*up_proj.* NaN"):
        load_model(engine_config(folder, parallel=TWO))
    assert not list(children(os.getpid()))


# --- they live and end together ---


def children(pid: int) -> Iterator[int]:
    """Yield the ranks that a process has started."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"parallel.rank" in Path(f"/proc/{child}/cmdline").read_bytes():
                yield int(child)


@pytest.fixture
def config(make_folder: Folder, engine_config: Config) -> EngineConfig:
    return engine_config(make_folder(), parallel=TWO, kv_cache_memory_bytes=1 << 20)


LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


async def one_token(client: EngineClient) -> list[int]:
    stream = client.submit([1, 2, 3], replace(LONG, max_tokens=1))
    while stream.finished is None:
        await stream.wait()
    return stream.read()[0]


async def test_killed_rank_ends_the_group_and_it_is_replaced(config: EngineConfig) -> None:
    client = EngineClient(config)
    try:
        await client.start()
        assert client.ready is not None
        engine = client.ready.pid
        (rank,) = children(engine)
        maps = Path(f"/proc/{rank}/maps").read_text()
        assert "/memfd:quire-ranks (deleted)" in maps and "/dev/shm" not in maps, "no segment can stay behind"
        stream = client.submit([1, 2, 3], LONG)
        await stream.wait()
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(Unavailable, match="lost another rank of its group"):
            while True:
                await stream.wait()
        assert process_ends(engine, 30) and process_ends(rank, 30)
        async with asyncio.timeout(240):
            while client.ready is None or client.ready.pid == engine:
                await asyncio.sleep(0.05)
        (other,) = children(client.ready.pid)
        assert await one_token(client)
    finally:
        await client.close()
    assert process_ends(other, 30)


async def test_stopped_rank_is_detected_and_no_process_remains(config: EngineConfig) -> None:
    client = EngineClient(replace(config, engine_process=EngineProcessOptions(hang_timeout_seconds=2.0)))
    try:
        await client.start()
        assert client.ready is not None
        engine = client.ready.pid
        (rank,) = children(engine)
        stream = client.submit([1, 2, 3], LONG)
        await stream.wait()
        os.kill(rank, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="made no step"):
            while True:
                await stream.wait()
        assert process_ends(engine, 30) and process_ends(rank, 30)
    finally:
        await client.close()


async def test_rank_ends_with_a_killed_engine_process(config: EngineConfig) -> None:
    client = EngineClient(replace(config, engine_process=EngineProcessOptions(restart_delays_seconds=())))
    try:
        await client.start()
        assert client.ready is not None
        (rank,) = children(client.ready.pid)
        os.kill(client.ready.pid, signal.SIGKILL)
        assert process_ends(rank, 30)
    finally:
        await client.close()


@pytest.mark.slow
async def test_nodes_live_and_end_together(
    make_folder: Folder, engine_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes on this machine, with both kinds of parallelism over them; the second one loses a rank."""
    monkeypatch.setenv("QUIRE_GROUP_SECRET", "the secret of this test")
    (port,) = free_ports(1)
    folder = make_folder()
    configs = [
        engine_config(
            folder,
            parallel=ParallelOptions(tensor=2, nodes=2, node_rank=node, master_port=port),
            kv_cache_memory_bytes=1 << 20,
        )
        for node in range(2)
    ]
    first, second = clients = [EngineClient(config) for config in configs]
    try:
        await asyncio.gather(*(client.start() for client in clients))
        assert first.ready is not None and second.ready is not None
        expected = await one_token(first)
        (rank,) = children(second.ready.pid)
        assert not list(children(first.ready.pid)), "rank 0 is alone on its node"
        before = [client.ready.pid for client in clients if client.ready is not None]
        stream = first.submit([1, 2, 3], LONG)
        await stream.wait()
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(Unavailable, match="lost another rank of its group"):
            while True:
                await stream.wait()
        assert all(process_ends(pid, 30) for pid in (rank, *before))
        async with asyncio.timeout(240):
            while any(client.ready is None or client.ready.pid in before for client in clients):
                await asyncio.sleep(0.05)
        assert await one_token(first) == expected
        (rank,) = children(second.ready.pid)
    finally:
        for client in clients:
            await client.close()
    assert process_ends(rank, 30)
