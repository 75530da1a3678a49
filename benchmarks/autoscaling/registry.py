"""The policies by name: their scalers, the parameters for the tuner, and the chosen configurations.

A configuration is a flat table of parameters, stored as JSON in ``tuned/``; a policy turns it and a load into a scaler.
KEDA's thresholds on rates are shares of one replica's capacity, as a user sets them after measuring the engine: a fixed
number would be wrong for engines of different speed.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.autoscaling.loads import Load, busy_seconds
from benchmarks.autoscaling.policies.hpa import HpaConfig, HpaScaler, Rules, Step, Unit
from benchmarks.autoscaling.policies.keda import KedaConfig, KedaScaler, Query
from benchmarks.autoscaling.policies.kpa import KpaConfig, KpaScaler
from benchmarks.autoscaling.policies.llmd import Analyzer, EngineLimits, LlmdConfig, LlmdScaler, chart_rules
from benchmarks.autoscaling.policies.quire import QuireConfig, quire_scaler
from benchmarks.autoscaling.scenarios import MAX_REPLICAS, MIN_REPLICAS
from quire_cli.simulation.fleet import Scaler
from quire_operator.domain.autoscaling.tuning import Tuning

TUNED = Path(__file__).parent / "tuned"

Value = float | int | str | bool | None
Parameters = Mapping[str, Value]


class ConfigurationError(ValueError):
    """A file in ``tuned/`` with an unknown or a missing parameter of its policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy. ``space`` has, by parameter, the values that the tuner samples; the first is the published default."""

    name: str
    space: Mapping[str, Sequence[Value]]
    make: Callable[[Parameters, Load, float], Scaler]
    follows_target: bool = False
    """True if the policy accepts the share of answers that must be in time, which is the user's target."""

    @property
    def defaults(self) -> Parameters:
        return {name: values[0] for name, values in self.space.items()}

    def scaler(self, parameters: Parameters, load: Load, target: float) -> Scaler:
        """Return a scaler with these parameters. Raise ConfigurationError."""
        if parameters.keys() != self.space.keys():
            odd = ", ".join(sorted(parameters.keys() ^ self.space.keys()))
            raise ConfigurationError(f"parameters of {self.name} are {', '.join(self.space)}; check {odd}")
        return self.make(parameters, load, target)


def tuned(policy: Policy, folder: Path = TUNED) -> Parameters:
    """Return the parameters that ``tune.py`` chose, or the defaults if it has not run. Raise ConfigurationError."""
    path = folder / f"{policy.name}.json"
    if not path.exists():
        return policy.defaults
    try:
        parameters = json.loads(path.read_text(encoding="utf-8"))["parameters"]
        return {str(name): value for name, value in parameters.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f'{path} should be {{"parameters": {{…}}}} as tune.py writes it: {type(error).__name__}: {error}'
        ) from None


def _number(parameters: Parameters, name: str) -> float:
    value = parameters[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"{name} should be a number, got {value!r}")
    return value


def _numbers(parameters: Parameters, names: Iterable[str]) -> dict[str, Any]:
    """Return these parameters as the fields of a configuration, which have the same names."""
    return {name: _number(parameters, name) for name in names}


def _same_names(config: type[Any], parameters: Parameters) -> set[str]:
    """Return the parameters that are fields of a configuration."""
    return {field.name for field in fields(config)} & parameters.keys()


def _optional(parameters: Parameters, name: str) -> float | None:
    return None if parameters[name] is None else _number(parameters, name)


# --- HPA, and what KEDA hands to it ---

_WINDOWS = (300.0, 60.0, 600.0, 900.0, 1200.0, 1800.0, 3600.0)
_BEHAVIOR: dict[str, Sequence[Value]] = {
    "up_pods": (4, 2, 8, 16),
    "up_percent": (100, 50, 200),
    "up_window_seconds": (0.0, 30.0),
    "down_window_seconds": _WINDOWS,
    "down_percent": (100, 10, 20, 50),
    "down_period_seconds": (15.0, 60.0, 120.0),
    "tolerance": (0.1, 0.02, 0.05),
}


def _up(parameters: Parameters) -> Rules:
    return Rules(
        window_seconds=_number(parameters, "up_window_seconds"),
        policies=(
            Step(unit=Unit.PERCENT, value=_number(parameters, "up_percent"), period_seconds=15.0),
            Step(unit=Unit.PODS, value=_number(parameters, "up_pods"), period_seconds=15.0),
        ),
        tolerance=_number(parameters, "tolerance"),
    )


def _down(parameters: Parameters) -> Rules:
    percent, period = _number(parameters, "down_percent"), _number(parameters, "down_period_seconds")
    return Rules(
        window_seconds=_number(parameters, "down_window_seconds"),
        policies=(Step(unit=Unit.PERCENT, value=percent, period_seconds=period),),
        tolerance=_number(parameters, "tolerance"),
    )


def _hpa(parameters: Parameters, load: Load, target: float) -> Scaler:
    config = HpaConfig(
        requests_per_pod=_number(parameters, "requests_per_pod"),
        kv_usage=_optional(parameters, "kv_usage"),
        up=_up(parameters),
        down=_down(parameters),
    )
    return HpaScaler(config, minimum=MIN_REPLICAS, maximum=MAX_REPLICAS)


HPA = Policy(
    name="hpa",
    space={
        "requests_per_pod": (16.0, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0),
        "kv_usage": (None, 0.05, 0.1, 0.2, 0.4, 0.6),
        **_BEHAVIOR,
    },
    make=_hpa,
)


def _keda(parameters: Parameters, load: Load, target: float) -> Scaler:
    query = Query[str(parameters["query"])]
    replicas = _optional(parameters, "fallback_replicas")
    config = KedaConfig(
        query=query,
        threshold=_keda_threshold(query, parameters, load),
        ignore_null_values=bool(parameters["ignore_null_values"]),
        fallback_replicas=None if replicas is None else int(replicas),
        up=_up(parameters),
        down=_down(parameters),
    )
    return KedaScaler(config, minimum=MIN_REPLICAS, maximum=MAX_REPLICAS)


def _keda_threshold(query: Query, parameters: Parameters, load: Load) -> float:
    share = _number(parameters, "rate_share")
    match query:
        case Query.TOKEN_RATE:
            return share * load.engine.prefill_tokens_per_second
        case Query.REQUEST_RATE:
            return share * len(load.requests) / busy_seconds(load.requests, load.engine)
        case _:
            return _number(parameters, "requests_threshold")


KEDA = Policy(
    name="keda",
    space={
        "query": (Query.IN_FLIGHT.name, Query.WAITING.name, Query.REQUEST_RATE.name, Query.TOKEN_RATE.name),
        "requests_threshold": (16.0, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0),
        "rate_share": (0.8, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6),
        "ignore_null_values": (True, False),
        "fallback_replicas": (None, 12),
        **_BEHAVIOR,
    },
    make=_keda,
)


# --- KPA ---


def _kpa(parameters: Parameters, load: Load, target: float) -> Scaler:
    return KpaScaler(KpaConfig(**_numbers(parameters, parameters)), minimum=MIN_REPLICAS, maximum=MAX_REPLICAS)


KPA = Policy(
    name="kpa",
    space={
        "target": (100.0, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0),
        "stable_window_seconds": (60.0, 30.0, 120.0, 300.0),
        "panic_window_share": (0.1, 0.2, 0.5),
        "panic_threshold": (2.0, 1.1, 1.5, 3.0, 10.0),
        "max_scale_up_rate": (1000.0, 1.5, 2.0),
        "max_scale_down_rate": (2.0, 1.1, 1.5),
        "scale_down_delay_seconds": (0.0, 300.0, 600.0, 900.0, 1200.0, 1800.0, 3600.0),
    },
    make=_kpa,
)


# --- llm-d ---


def _llmd(parameters: Parameters, load: Load, target: float) -> Scaler:
    config = LlmdConfig(
        **_numbers(parameters, _same_names(LlmdConfig, parameters) - {"analyzer"}),
        analyzer=Analyzer(str(parameters["analyzer"])),
        up=chart_rules(_number(parameters, "up_window_seconds")),
        down=chart_rules(_number(parameters, "down_window_seconds")),
    )
    limits = EngineLimits(max_batched_tokens=load.engine.max_batched_tokens, max_sequences=load.engine.max_sequences)
    return LlmdScaler(config, limits=limits, minimum=MIN_REPLICAS, maximum=MAX_REPLICAS)


LLMD = Policy(
    name="llmd",
    space={
        "analyzer": (Analyzer.TOKENS.value, Analyzer.PERCENTAGE.value),
        "kv_cache_threshold": (0.8, 0.2, 0.4, 0.6, 0.9),
        "queue_length_threshold": (5.0, 1.0, 2.0, 3.0),
        "kv_spare_trigger": (0.1, 0.05, 0.15),
        "queue_spare_trigger": (3.0, 0.5, 1.0, 2.0),
        "scale_up_threshold": (0.85, 0.2, 0.3, 0.45, 0.6),
        "scale_down_boundary": (0.7, 0.15, 0.25, 0.4, 0.55),
        "interval_seconds": (60.0, 15.0, 30.0),
        "up_window_seconds": (240.0, 0.0, 30.0),
        "down_window_seconds": (240.0, 600.0, 900.0, 1200.0, 1800.0, 3600.0),
    },
    make=_llmd,
)


# --- ours ---


def _quire(parameters: Parameters, load: Load, target: float) -> Scaler:
    config = QuireConfig(
        **_numbers(parameters, _same_names(QuireConfig, parameters)),
        percentile=round(100 * target),
        tuning=Tuning(**_numbers(parameters, _same_names(Tuning, parameters))),
    )
    return quire_scaler(config, max_sequences=load.engine.max_sequences, minimum=MIN_REPLICAS, maximum=MAX_REPLICAS)


QUIRE = Policy(
    name="quire",
    space={
        "threshold_seconds": (1.0, 2.0),
        "up_max_step": (4, 8),
        "down_window_seconds": (300.0, 180.0, 450.0, 600.0, 900.0),
        "down_max_step": (1, 2),
        "down_period_seconds": (60.0, 30.0),
        "scrape_seconds": (0.0,),
        "spare": (0.5, 0.4, 0.45, 0.55, 0.6),
        "rise": (1.2, 0.6, 0.9, 1.5),
        "flow_seconds": (60.0,),
        "drain_seconds": (30.0,),
        "first_token_seconds": (30.0,),
    },
    make=_quire,
    follows_target=True,
)

POLICIES: Mapping[str, Policy] = {policy.name: policy for policy in (QUIRE, HPA, KPA, KEDA, LLMD)}
PEERS = ("hpa", "kpa", "keda", "llmd")
