"""Adapters in host memory: what is read, kept, removed and read again, by the thread that reads."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_support.folders import make_adapter

from quire_common.errors import FlagsError
from quire_engine.config import AdapterOptions, EngineConfig
from quire_engine.core.ports import AdapterEvent
from quire_engine.runner import load_model
from quire_engine.runner.adapter_store import AdapterStore

SHAPES = {"model.layers.0.self_attn.q_proj": (32, 16)}


@pytest.fixture
def store() -> Iterator[AdapterStore]:
    made = AdapterStore(modules=SHAPES, max_rank=16, dtype=torch.float32, capacity=2)
    yield made
    made.close()


def read(store: AdapterStore, count: int) -> list[AdapterEvent]:
    events: list[AdapterEvent] = []
    deadline = time.monotonic() + 20
    while len(events) < count and time.monotonic() < deadline:
        events += store.take_events()
        time.sleep(0.001)
    return events


def folder(tmp_path: Path, number: int) -> str:
    return str(make_adapter(tmp_path / str(number), SHAPES, seed=number))


def test_all_adapters_are_checked_and_the_latest_are_kept(store: AdapterStore, tmp_path: Path) -> None:
    woken: list[None] = []
    store.on_read = lambda: woken.append(None)
    for number in range(1, 6):
        store.add(number, folder(tmp_path, number))
    events = read(store, 5)
    assert [event.adapter for event in events] == [1, 2, 3, 4, 5] and len(woken) == 5
    assert all(event.rank == 4 and event.reason is None for event in events)
    assert sum(store.has(number) for number in range(1, 6)) == 2


def test_adapters_in_use_are_not_evicted(store: AdapterStore, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        store.add(number, folder(tmp_path, number))
    read(store, 3)
    for number in (1, 3):
        assert store.fetch(number)
        store.hold(number)
    read(store, 2 - store.has(1) - store.has(3))
    assert not store.fetch(2)
    store.release(1)
    assert store.fetch(2)
    read(store, 1)
    assert store.has(2) and store.has(3) and not store.has(1)


def test_files_that_changed_are_not_read_again(store: AdapterStore, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        store.add(number, folder(tmp_path, number))
    read(store, 3)
    gone = next(number for number in (1, 2, 3) if not store.has(number))
    make_adapter(tmp_path / str(gone), SHAPES, seed=9)
    assert store.fetch(gone)
    (event,) = read(store, 1)
    assert event.adapter == gone and "changed after the adapter was loaded" in event.message


def test_a_folder_that_cannot_be_served_is_reported(store: AdapterStore, tmp_path: Path) -> None:
    store.add(1, str(tmp_path / "none"))
    (event,) = read(store, 1)
    assert event.reason == "InvalidAdapter" and "has no adapter_config.json" in event.message


def test_a_model_is_loaded_with_slots(
    make_folder: Callable[..., Path], engine_config: Callable[..., EngineConfig]
) -> None:
    config = engine_config(make_folder(), kv_cache_memory_bytes=100_000)
    options = AdapterOptions(enabled=True, max_loras=3, max_lora_rank=8, max_cpu_loras=5)
    model = load_model(replace(config, adapters=options))
    assert model.adapters is not None and model.traits.adapter_slots == 3
    model.adapters.close()
    model.runner.close()


def test_transformers_models_support_no_adapters(
    make_folder: Callable[..., Path], engine_config: Callable[..., EngineConfig]
) -> None:
    config = engine_config(make_folder(), kv_cache_memory_bytes=100_000)
    config = replace(
        config, model=replace(config.model, model_impl="transformers"), adapters=AdapterOptions(enabled=True)
    )
    with pytest.raises(FlagsError) as error:
        load_model(config)
    assert "--enable-lora is for quire's own model families" in error.value.problems[0]
