"""spec.engine and spec.resources: how each replica's engine runs, and what hardware it asks for."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from quire_common.names import object_name_problem
from quire_common.quantities import parse_bytes, parse_quantity
from quire_operator.domain.resource.engine_flags import extra_args_problems
from quire_operator.domain.resource.fields import Fields, shown

GPU_RESOURCE = "nvidia.com/gpu"
BLOCK_SIZES = (16, 32, 64, 128)


class DType(StrEnum):
    AUTO = "Auto"
    FLOAT32 = "Float32"
    FLOAT16 = "Float16"
    BFLOAT16 = "BFloat16"


class PrefixCaching(StrEnum):
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class SchedulingPolicy(StrEnum):
    FCFS = "FCFS"
    PRIORITY = "Priority"
    FAIR = "Fair"
    """Among tenants, which are API keys."""


class Preemption(StrEnum):
    AUTO = "Auto"
    """Whatever was measured to cost less, where there is swap space."""
    SWAP = "Swap"
    RECOMPUTE = "Recompute"


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShare:
    """The KV cache takes this share of the GPU's memory, else of the pod's limit; locally of RAM ÷ maxReplicas."""

    memory_percent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSize:
    """The KV cache takes exactly this much."""

    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    image: str | None
    """None takes the operator's default."""
    image_pull_policy: PullPolicy | None
    """None takes the operator's default."""
    image_pull_secrets: tuple[str, ...]
    dtype: DType
    max_model_length: int | None
    """Tokens of one sequence, prompt and answer; None takes the model's own limit."""
    max_batched_tokens: int
    max_sequences: int
    block_size: int
    kv_cache: KVCacheShare | KVCacheSize
    prefix_caching: PrefixCaching
    scheduling_policy: SchedulingPolicy
    preemption: Preemption
    swap_space_bytes: int
    """Host memory for the blocks of preempted sequences; 0 is none."""
    extra_args: tuple[str, ...]

    @property
    def invents_weights(self) -> bool:
        """Random weights of the right shape: for trying things out where the real ones are not at hand."""
        return self._says("load-format", "dummy")

    @property
    def kv_cache_in_fp8(self) -> bool:
        """Keys and values in one byte each."""
        return self._says("kv-cache-dtype", "fp8")

    @property
    def weights_in_int8(self) -> bool:
        """Those of linear layers in one byte each."""
        return self._says("quantization", "int8")

    def _says(self, flag: str, value: str) -> bool:
        return f"--{flag}={value}" in self.extra_args or (f"--{flag}", value) in pairwise(self.extra_args)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """As in a container: resource name → quantity, in the words a person used."""

    limits: Mapping[str, str]
    requests: Mapping[str, str]

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return int(self.limits.get(GPU_RESOURCE, self.requests.get(GPU_RESOURCE, "0")))

    @property
    def memory_limit_bytes(self) -> int | None:
        limit = self.limits.get("memory")
        return None if limit is None else parse_bytes(limit)


def read_engine(fields: Fields) -> Engine:
    max_sequences = fields.integer("maxSequences", default=256, minimum=1)
    max_batched_tokens = fields.integer("maxBatchedTokens", default=2048, minimum=1)
    if max_batched_tokens < max_sequences:
        fields.problem(
            "maxBatchedTokens",
            f"must be >= maxSequences ({max_sequences}): each sequence uses one token of a step; "
            f"got {max_batched_tokens}",
        )
    engine = Engine(
        image=fields.text("image", default=None),
        image_pull_policy=fields.optional_choice("imagePullPolicy", PullPolicy),
        image_pull_secrets=_read_pull_secrets(fields),
        dtype=fields.choice("dtype", DType, default=DType.AUTO),
        max_model_length=fields.integer("maxModelLength", default=None, minimum=1),
        max_batched_tokens=max_batched_tokens,
        max_sequences=max_sequences,
        block_size=_read_block_size(fields),
        kv_cache=_read_kv_cache(fields),
        prefix_caching=fields.choice("prefixCaching", PrefixCaching, default=PrefixCaching.ENABLED),
        scheduling_policy=fields.choice("schedulingPolicy", SchedulingPolicy, default=SchedulingPolicy.FCFS),
        preemption=fields.choice("preemption", Preemption, default=Preemption.AUTO),
        swap_space_bytes=fields.byte_size("swapSpace", minimum=0) or 0,
        extra_args=_read_extra_args(fields),
    )
    if engine.preemption is Preemption.SWAP and not engine.swap_space_bytes:
        fields.problem("preemption", "Swap requires swapSpace: set swapSpace, for example to 4Gi, or use Auto")
    fields.done()
    return engine


def read_resources(fields: Fields) -> Resources:
    resources = Resources(limits=_read_amounts(fields, "limits"), requests=_read_amounts(fields, "requests"))
    fields.done()
    return resources


def _read_pull_secrets(fields: Fields) -> tuple[str, ...]:
    names: list[str] = []
    for secret in fields.sections("imagePullSecrets"):
        name = secret.text("name", default=None, check=object_name_problem)
        if not secret.has("name"):
            secret.problem("name", "is required")
        if name is not None:
            names.append(name)
        secret.done()
    return tuple(names)


def _read_block_size(fields: Fields) -> int:
    size = fields.integer("blockSize", default=16)
    if size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        fields.problem("blockSize", f"must be one of {sizes}, got {size}")
    return size


def _read_kv_cache(fields: Fields) -> KVCacheShare | KVCacheSize:
    cache = fields.section("kvCache")
    percent = cache.integer("memoryPercent", default=90, minimum=1, maximum=100)
    size = cache.byte_size("size")
    cache.done()
    return KVCacheShare(memory_percent=percent) if size is None else KVCacheSize(size_bytes=size)


def _read_extra_args(fields: Fields) -> tuple[str, ...]:
    before = len(fields.problems)
    args = fields.texts("extraArgs")
    if len(fields.problems) == before:  # else the indices would not be those of the list
        for problem in extra_args_problems(args):
            fields.problem(f"extraArgs[{problem.index}]", problem.message)
    return args


def _read_amounts(fields: Fields, key: str) -> dict[str, str]:
    amounts: dict[str, str] = {}
    for name, value in fields.mapping(key).items():
        where = f"{key}[{name[:60]}]"
        readable = isinstance(value, str | int) and not isinstance(value, bool)
        quantity = parse_quantity(value) if readable and isinstance(value, str | int) else None
        if quantity is None:
            fields.problem(where, f'must be a quantity such as 1, "500m" or "16Gi", got {shown(value)}')
        elif name == GPU_RESOURCE and quantity.denominator != 1:
            fields.problem(where, f"must be a whole number of GPUs, got {shown(value)}")
        elif name == GPU_RESOURCE and quantity > 1:
            fields.problem(where, "must be 1: a replica uses one GPU")
        else:
            amounts[name] = str(int(quantity)) if name == GPU_RESOURCE else str(value)
    return amounts
