"""Tiny random-weight models in Hugging Face layout, and engines that load them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from quire_parity.answering import Answering
from quire_parity.cases import Case, save

from quire_engine.config import (
    CacheOptions,
    DeviceOptions,
    EngineConfig,
    ModelOptions,
    ParallelOptions,
    PoolingSetup,
    ServerOptions,
    SpeculationOptions,
)
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.ports import LoadedModel
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.engine import make_engine
from quire_engine.runner import load_model


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a factory of checkpoints of a random model of a transformers ``family`` with changed config fields."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", **changes: Any) -> Path:
        name = repr((family, sorted(changes.items())))
        if name not in made:
            made[name] = tmp_path_factory.mktemp(family)
            save(Case(family=family, fields={"pad_token_id": None, **changes}), made[name])
        return made[name]

    return make


@pytest.fixture(scope="session")
def engine_config() -> Callable[..., EngineConfig]:
    def make(
        folder: Path,
        *,
        scheduler: SchedulerOptions | None = None,
        speculation: SpeculationOptions | None = None,
        deterministic: bool = False,
        pooling: PoolingSetup | None = None,
        parallel: ParallelOptions | None = None,
        **changes: Any,
    ) -> EngineConfig:
        of_cache, of_scheduler = (
            {name: changes.pop(name) for name in list(changes) if name in kind.__dataclass_fields__}
            for kind in (CacheOptions, SchedulerOptions)
        )
        scheduler = scheduler or SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=256)
        return EngineConfig(
            model=ModelOptions(path=folder, **{"dtype": "float32", **changes}),
            cache=CacheOptions(**of_cache),
            scheduler=replace(scheduler, **of_scheduler),
            server=ServerOptions(),
            speculation=speculation,
            pooling=pooling,
            device=DeviceOptions(deterministic=deterministic),
            threads=2 if parallel is None else 1,
            parallel=parallel or ParallelOptions(),
        )

    return make


@dataclass
class Running(Answering):
    """An engine with a loaded model."""

    model: LoadedModel = field(kw_only=True)


@pytest.fixture(scope="session")
def start(engine_config: Callable[..., EngineConfig]) -> Callable[..., Running]:
    def make(folder: Path, **changes: Any) -> Running:
        config = engine_config(folder, **changes)
        model = load_model(config)
        engine = make_engine(model, scheduler=config.scheduler, speculation=config.speculation)
        return Running(engine, model=model)

    return make


@pytest.fixture
def greedy() -> Callable[[int], SamplingParams]:
    return lambda max_tokens: SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture
def sampled() -> Callable[..., SamplingParams]:
    base = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    return lambda **changes: replace(base, **changes)
