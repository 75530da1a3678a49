"""Tiny random-weight models in Hugging Face layout, and engines that load them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from quire_parity.answering import Answering
from quire_parity.cases import VOCABULARY, Case, save

from quire_engine.config import (
    CacheOptions,
    DeviceOptions,
    EngineConfig,
    ModelOptions,
    ParallelOptions,
    PoolingSetup,
    SchedulerOptions,
    ServerOptions,
    SpeculationOptions,
)
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
def make_head(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a factory of random draft heads for the models of ``make_folder``, with changed config fields.

    ``left_out`` tensors are missing; ``prefix`` is that of all names.
    """

    def make(*, left_out: tuple[str, ...] = (), prefix: str = "", **changes: Any) -> Path:
        import torch
        from safetensors.torch import save_file

        config: dict[str, Any] = {
            "architectures": ["EagleLlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 80,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            **changes,
        }
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        kv = config["num_key_value_heads"] * (hidden // config["num_attention_heads"])
        shapes = {"fc.weight": (hidden, 2 * hidden)}
        for index in range(config["num_hidden_layers"]):
            layer = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
            layer = {f"self_attn.{name}": shape for name, shape in layer.items()} | {
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
                "post_attention_layernorm": (hidden,),
                **({"input_layernorm": (hidden,)} if index else {}),
            }
            shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        generator = torch.Generator().manual_seed(5)
        tensors = {
            f"{prefix}{name}": torch.randn(shape, generator=generator) * 0.15 + (len(shape) == 1)
            for name, shape in shapes.items()
            if name not in left_out
        }
        folder = tmp_path_factory.mktemp("head")
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        return folder

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
        cache = CacheOptions(
            **{name: changes.pop(name) for name in list(changes) if name in CacheOptions.__dataclass_fields__}
        )
        return EngineConfig(
            model=ModelOptions(path=folder, **{"dtype": "float32", **changes}),
            cache=cache,
            scheduler=scheduler or SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=256),
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
        engine = make_engine(model, scheduler=config.scheduler, cache=config.cache, speculation=config.speculation)
        return Running(engine, model=model)

    return make


@pytest.fixture
def greedy() -> Callable[[int], SamplingParams]:
    return lambda max_tokens: SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture
def sampled() -> Callable[..., SamplingParams]:
    base = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    return lambda **changes: replace(base, **changes)
