"""Small fleets whose steps can be computed by hand, and autoscalers with scripted decisions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from quire_cli.simulation.engine import EngineModel
from quire_cli.simulation.fleet import Scaling, Scenario, simulate
from quire_cli.simulation.results import SimulatedRun
from quire_cli.simulation.traces import Request
from quire_operator.autoscaling.observation import Observation

# A prompt of 100 tokens takes a step of 0.2 s; one sequence decodes a token in 0.11 s, two in 0.12 s.
ENGINE = EngineModel(
    prefill_tokens_per_second=1000.0,
    step_seconds=0.1,
    decode_seconds_per_sequence=0.01,
    kv_tokens=16_000,
    max_sequences=8,
    max_batched_tokens=2000,
    max_generation_stall_seconds=None,
)


@dataclass
class Script:
    """An autoscaler that requests scripted numbers from given times on, and keeps its observations."""

    replicas: Mapping[float, int] = field(default_factory=dict)
    period_seconds: float = 10.0
    scrape_seconds: float = 0.0
    seen: list[tuple[float, Observation]] = field(default_factory=list)

    def decide(self, observation: Observation, now: float) -> Scaling:
        self.seen.append((now, observation))
        wanted = [count for time, count in sorted(self.replicas.items()) if time <= now]
        assert observation.target is not None
        return Scaling(replicas=wanted[-1] if wanted else observation.target, reason="Script", message="as written")


@dataclass
class Story:
    """A run and the autoscaler in it."""

    run: SimulatedRun
    script: Script


Play = Callable[..., Story]


@pytest.fixture
def play() -> Play:
    """Return a function that simulates requests of (time, prompt tokens, output tokens) on a changed ``ENGINE``."""

    def play(
        *requests: tuple[float, int, int] | Request,
        script: Mapping[float, int] | Script | None = None,
        engine: Mapping[str, Any] | None = None,
        **scenario: Any,
    ) -> Story:
        scaler = script if isinstance(script, Script) else Script(script or {})
        given = {"startup_delay_seconds": 30.0, "startup_jitter": 0.0, "max_replicas": 8, **scenario}
        told = [r if isinstance(r, Request) else Request(*r) for r in requests]
        run = simulate(told, Scenario(engine=replace(ENGINE, **(engine or {})), **given), scaler)
        return Story(run, scaler)

    return play
