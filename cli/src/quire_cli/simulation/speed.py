"""The speed of one engine of an LLMDeployment, from the best sources available.

Under ``command``. The sources, in this order, each for what the previous ones leave open: options, a calibration file,
what the autoscaler learned (``status.capacity``, in a file that ``kubectl get -o yaml`` wrote), else an estimate from
the model's size and the hardware's data sheet. Pure except for reading the calibration.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf, isfinite
from pathlib import Path

from quire_cli.errors import FileProblem, SimulationProblem
from quire_cli.simulation.engine import EngineModel
from quire_operator.api import Spec
from quire_operator.api.engine import PrefixCaching
from quire_operator.capacity.fit import Footprint
from quire_operator.deployment.status import scaling_record

_PREFILL_EFFICIENCY = 0.5
"""The share of peak arithmetic that prompts reach."""
_DECODE_EFFICIENCY = 0.7
"""The share of peak bandwidth that decoding reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Dense 16-bit arithmetic and memory bandwidth, by the data sheet."""

    teraflops: float
    gigabytes_per_second: float

    def times(self, count: int) -> "Hardware":
        """Return GPUs that share the work, as if they exchanged data in no time."""
        return Hardware(teraflops=count * self.teraflops, gigabytes_per_second=count * self.gigabytes_per_second)


GPUS: Mapping[str, Hardware] = {
    "T4 16GB": Hardware(teraflops=65, gigabytes_per_second=320),
    "A10G 24GB": Hardware(teraflops=70, gigabytes_per_second=600),
    "L4 24GB": Hardware(teraflops=121, gigabytes_per_second=300),
    "RTX 4090 24GB": Hardware(teraflops=165, gigabytes_per_second=1008),
    "A100 40GB": Hardware(teraflops=312, gigabytes_per_second=1555),
    "L40S 48GB": Hardware(teraflops=362, gigabytes_per_second=864),
    "H100 80GB": Hardware(teraflops=989, gigabytes_per_second=3350),
    "A100 80GB": Hardware(teraflops=312, gigabytes_per_second=2039),
    "H200 141GB": Hardware(teraflops=989, gigabytes_per_second=4800),
    "B200 180GB": Hardware(teraflops=2250, gigabytes_per_second=8000),
    "MI300X 192GB": Hardware(teraflops=1307, gigabytes_per_second=5300),
    "MI325X 256GB": Hardware(teraflops=1307, gigabytes_per_second=6000),
    "MI355X 288GB": Hardware(teraflops=2500, gigabytes_per_second=8000),
}
"""The hardware by the names in ``domain.capacity.gpus``; a test compares them."""
CPU = Hardware(teraflops=0.1, gigabytes_per_second=25)
"""Two server cores or so: little more than a guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The known figures of an engine; None is unknown."""

    prefill_tokens_per_second: float | None = None
    step_seconds: float | None = None
    decode_seconds_per_sequence: float | None = None
    kv_tokens: int | None = None
    decode_seconds_per_kv_token: float | None = None
    max_generation_stall_seconds: float | None = None
    max_model_length: int | None = None

    @property
    def is_enough(self) -> bool:
        """True if all figures without a default are known."""
        needed = (self.prefill_tokens_per_second, self.step_seconds, self.decode_seconds_per_sequence, self.kv_tokens)
        return None not in needed

    def or_else(self, other: "Speed") -> "Speed":
        """With the other's figures where this has none."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(other, **{name: value for name, value in known.items() if value is not None})


def learned(status: Mapping[str, object]) -> Speed | None:
    """Return the figures of ``status.capacity``, or None if they are incomplete."""
    record = scaling_record({"autoscaling": {}, "capacity": status.get("capacity")})
    rates = None if record is None else record.rates
    if rates is None:
        return None
    return Speed(
        prefill_tokens_per_second=rates.prefill_tokens_per_second or inf,
        step_seconds=rates.step_seconds,
        decode_seconds_per_sequence=rates.decode_seconds_per_token,
        kv_tokens=round(rates.kv_tokens),
    )


def estimated(
    needs: Footprint, hardware: Hardware, *, kv_tokens: int, max_model_length: int | None, stages: int = 1
) -> Speed:
    """Return an estimate from the arithmetic of a prompt and the memory traffic of a decode step.

    With several ``stages``, a token passes through one after the other, and each reads the weights of its layers from
    its own part of the hardware. All other work of different sequences is shared among the stages.
    """
    flops = hardware.teraflops * 1e12 * _PREFILL_EFFICIENCY
    bandwidth = hardware.gigabytes_per_second * 1e9 * _DECODE_EFFICIENCY
    per_token = 2 * needs.parameters / flops
    return Speed(
        prefill_tokens_per_second=1 / per_token,
        step_seconds=stages * needs.weight_bytes / bandwidth,
        decode_seconds_per_sequence=per_token,
        decode_seconds_per_kv_token=needs.kv_bytes_per_token / bandwidth,
        kv_tokens=kv_tokens,
        max_model_length=max_model_length,
    )


def read_calibration(path: Path) -> Speed:
    """Return the figures of a JSON file with the fields of ``Speed``, or raise FileProblem."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileProblem(f"the calibration file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FileProblem(f"the calibration file {path} is not JSON: {error}") from error
    known = {field.name for field in fields(Speed)}
    hint = f"known keys: {', '.join(sorted(known))}"
    if not isinstance(body, Mapping):
        raise FileProblem(f"the calibration file {path} is not a JSON object", hint=hint)
    problems = [f'"{key}" is not known' for key in body if key not in known]
    bad = [(key, value) for key, value in body.items() if not _is_good(key, value)]
    problems += [f'"{key}" must be a number > 0, got {json.dumps(value)}' for key, value in bad]
    if problems:
        raise FileProblem(f"the calibration file {path} is invalid", details=problems, hint=hint)
    whole = {key: int(body[key]) for key in ("kv_tokens", "max_model_length") if key in body}
    return Speed(**{**body, **whole})


_MAY_BE_ZERO = frozenset({"decode_seconds_per_sequence", "decode_seconds_per_kv_token"})


def _is_good(key: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return False
    return value > 0 or (value == 0 and key in _MAY_BE_ZERO)


def engine_model(spec: Spec, speed: Speed) -> EngineModel:
    """Return the engine that the spec describes, at this speed."""
    engine = spec.engine
    assert speed.prefill_tokens_per_second is not None and speed.step_seconds is not None
    assert speed.decode_seconds_per_sequence is not None and speed.kv_tokens is not None
    if speed.kv_tokens < engine.block_size:
        block = f"a block of {engine.block_size} (spec.engine.blockSize)"
        raise SimulationProblem(f"a KV cache of {speed.kv_tokens} tokens is smaller than {block}")
    model = EngineModel(
        prefill_tokens_per_second=speed.prefill_tokens_per_second,
        step_seconds=speed.step_seconds,
        decode_seconds_per_sequence=speed.decode_seconds_per_sequence,
        decode_seconds_per_kv_token=speed.decode_seconds_per_kv_token or 0.0,
        kv_tokens=speed.kv_tokens,
        max_sequences=engine.max_sequences,
        max_batched_tokens=engine.max_batched_tokens,
        max_model_length=engine.max_model_length or speed.max_model_length,
        block_size=engine.block_size,
        prefix_caching=engine.prefix_caching is PrefixCaching.ENABLED,
    )
    stall = speed.max_generation_stall_seconds
    return model if stall is None else replace(model, max_generation_stall_seconds=stall)
