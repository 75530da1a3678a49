"""spec.engine: how a replica runs, on how many processes and nodes, and how many adapters it holds."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import pairwise
from typing import Any, ClassVar, Literal

from quire_common.quantities import parse_bytes, parse_quantity
from quire_operator.api.field_kinds import ByteSize, Choice, Integer, ObjectName, SecretReference, Text, quantity_schema
from quire_operator.api.fields import Fields, shown
from quire_operator.api.model import Speculation
from quire_operator.api.schema import JSON, Kind, Rule, Section, SectionList

MAX_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Ranks are processes, each of which has a share of the model. A replica with several nodes is a group of pods."""

    tensor: int = Integer(
        "Number of ranks that share each layer (tensor parallelism). It must divide the model's attention heads "
        "and the intermediate sizes of its feed-forward layers, and divide its KV heads or be a multiple of them.",
        minimum=1,
        maximum=MAX_SIZE,
        flags=("tensor-parallel-size",),
    ).default(1)
    pipeline: int = Integer(
        "Number of stages among which the layers are divided (pipeline parallelism), which must divide the number "
        "of layers. Each stage has `tensor` ranks.",
        minimum=1,
        maximum=MAX_SIZE,
        flags=("pipeline-parallel-size",),
    ).default(1)
    nodes: int = Integer(
        "Number of pods of each replica, which must divide tensor × pipeline. Each pod has its share of the ranks, "
        "and spec.resources are those of one pod, GPUs included. With 2 or more, a replica is a group of pods, "
        "which are on different nodes where that is possible, and the cluster needs LeaderWorkerSet "
        "(leaderworkerset.x-k8s.io). Cannot change between 1 and more.",
        minimum=1,
        maximum=MAX_SIZE,
        flags=("nnodes", "node-rank", "master-addr", "master-port", "group-secret-file", "distributed-timeout-seconds"),
    ).default(1)

    RULES: ClassVar = (
        Rule(
            at="nodes",
            cel="((has(self.tensor) ? self.tensor : 1) * (has(self.pipeline) ? self.pipeline : 1)) "
            "% (has(self.nodes) ? self.nodes : 1) == 0",
            holds=lambda shape, document: shape.ranks % shape.nodes == 0,
            message="must divide tensor × pipeline, because each pod has as many ranks as the others",
        ),
    )

    @property
    def ranks(self) -> int:
        """The number of processes of a replica."""
        return self.tensor * self.pipeline

    @property
    def ranks_per_node(self) -> int:
        """The number of processes of one pod."""
        return self.ranks // self.nodes

    @property
    def is_group(self) -> bool:
        return self.nodes > 1


_IN_MEMORY_PER_SLOT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSlots:
    """The slots for adapters, and how many adapters stay in host memory."""

    max_rank: int = Integer(
        "Highest rank of an adapter. Each slot has room for this rank.",
        minimum=1,
        maximum=512,
        flags=("max-lora-rank",),
    ).default(16)
    max_loaded: int = Integer(
        "Number of slots: the number of different adapters that one step can use. Requests for others wait for a slot.",
        minimum=1,
        maximum=4096,
        flags=("max-loras",),
    ).default(8)
    max_in_memory: int | None = Integer(
        "Number of adapters that stay in host memory. Others are read from disk again when a request needs them. "
        "Default is 4 times maxLoaded.",
        minimum=1,
        maximum=65536,
        flags=("max-cpu-loras",),
    ).default(None)
    credentials_secret: str | None = SecretReference(
        "Secret in this namespace with the credentials for the sources of LLMAdapters. It may have the keys of "
        "several kinds of sources: `token` for hf://, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, "
        "AWS_REGION and AWS_ENDPOINT_URL for s3://. A store that a source names by ?endpoint= gets no credentials "
        "unless it is AWS_ENDPOINT_URL. Replicas read the secret when they start. It is set here because a "
        "running pod cannot get another secret.",
        secret="Name of the secret.",
    ).default(None)

    RULES: ClassVar = (
        Rule(
            at="maxInMemory",
            # has(): the server evaluates this rule before it has written the defaults.
            cel="!has(self.maxInMemory) || !has(self.maxLoaded) || self.maxInMemory >= self.maxLoaded",
            holds=lambda slots, document: slots.in_memory >= slots.max_loaded,
            message="must be at least maxLoaded: an adapter in a slot is in host memory too",
        ),
    )

    @property
    def in_memory(self) -> int:
        """The number of adapters in host memory."""
        return _IN_MEMORY_PER_SLOT * self.max_loaded if self.max_in_memory is None else self.max_in_memory


NVIDIA_GPU, AMD_GPU = "nvidia.com/gpu", "amd.com/gpu"
GPU_RESOURCES = (NVIDIA_GPU, AMD_GPU)
"""The resources of device plugins whose GPUs a replica has for itself."""
_GPU = re.compile(r"amd\.com/gpu|nvidia\.com/(gpu(\.shared)?|mig-.+)")
"""All resources that are a GPU to the engine: whole ones, those shared by time slices or MPS, and MIG slices."""
_MIG = re.compile(r"nvidia\.com/mig-(?P<profile>.+?)(\.shared)?")
_MIG_MEMORY = re.compile(r"(\d+c\.)?\d+g\.(?P<gigabytes>\d+)gb(\..+)?")
_OTHER_DEVICES = re.compile(
    r"amd\.com/[a-z]+_nps\d+|gpu\.intel\.com/.+|habana\.ai/.+|google\.com/tpu|aws\.amazon\.com/neuron.*"
)
"""Devices that the engine does not use: partitions of AMD's GPUs and accelerators of other makers."""
BLOCK_SIZES = (16, 32, 64, 128)
_MAX_ARGUMENTS = 64


def is_gpu(resource: str) -> bool:
    """Return True if a resource of a container is a GPU, or a part of one, that the engine can use."""
    return _GPU.fullmatch(resource) is not None


class DType(StrEnum):
    AUTO = "Auto"
    FLOAT32 = "Float32"
    FLOAT16 = "Float16"
    BFLOAT16 = "BFloat16"


class PrefixCaching(StrEnum):
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class Resumable(StrEnum):
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class SchedulingPolicy(StrEnum):
    FCFS = "FCFS"
    PRIORITY = "Priority"
    FAIR = "Fair"
    """Fair among tenants, which are API keys."""


class Preemption(StrEnum):
    AUTO = "Auto"
    """The mode that was measured to cost less, if there is swap space."""
    SWAP = "Swap"
    RECOMPUTE = "Recompute"


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch(Choice):
    """Enabled or Disabled; the engine has the feature unless ``--no-FLAG`` is set."""

    def arguments(self, value: Any) -> list[str]:
        return [f"--{self.flags[-1]}"] if value == "Disabled" else []


@dataclass(frozen=True, slots=True, kw_only=True)
class OptIn(Choice):
    """Enabled or Disabled; the engine has the feature only if ``--FLAG`` is set."""

    def arguments(self, value: Any) -> list[str]:
        return [f"--{self.flags[0]}"] if value == "Enabled" else []


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSecret:
    name: str = ObjectName("Name of the secret.").required()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments(Kind):
    """A list of command-line arguments; ``Spec.parse`` checks them against the engine's flags."""

    def schema(self, value_type: Any) -> JSON:
        item = {"description": "One command-line argument.", "type": "string", "maxLength": 1024}
        return {"type": "array", "maxItems": _MAX_ARGUMENTS, "x-kubernetes-list-type": "atomic", "items": item}

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        items = document.items(name, at_most=_MAX_ARGUMENTS)
        for index, item in enumerate(items):
            if not isinstance(item, str):
                document.problem(f"{name}[{index}]", f"must be a string, got {shown(item)}")
        return tuple(item for item in items if isinstance(item, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantities(Kind):
    """A map from the name of a resource to its quantity, as in a container."""

    def schema(self, value_type: Any) -> JSON:
        return {"type": "object", "maxProperties": 16, "additionalProperties": quantity_schema()}

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        amounts: dict[str, str] = {}
        for resource, value in document.mapping(name).items():
            where = f"{name}[{resource[:60]}]"
            quantity = parse_quantity(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
            if quantity is None:
                document.problem(where, f'must be a quantity such as 1, "500m" or "16Gi", got {shown(value)}')
            elif is_gpu(resource) and quantity.denominator != 1:
                document.problem(where, f"must be a whole number of GPUs, got {shown(value)}")
            else:
                amounts[resource] = str(int(quantity)) if is_gpu(resource) else str(value)
        return amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """The memory of the KV cache: a size, or without one a share of the GPU's memory, else of the pod's limit."""

    memory_percent: int = Integer(
        "Percentage of memory for weights and KV cache together: of GPU memory on a GPU, otherwise of the pod's "
        "memory limit. `quire up` divides the machine's RAM by maxReplicas instead.",
        minimum=1,
        maximum=100,
        is_default_stored=False,
        flags=("gpu-memory-utilization",),
    ).default(90)
    size_bytes: int | None = ByteSize(
        "Absolute size of the KV cache, such as 4Gi. It takes precedence over memoryPercent.",
        flags=("kv-cache-memory-bytes",),
    ).default(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    image: str | None = Text(
        "Container image of the engine. Default is the image configured in the operator.", min_length=1, max_length=1024
    ).default(None)
    image_pull_policy: PullPolicy | None = Choice(
        "When nodes pull the image. Default is the policy configured in the operator (images.pullPolicy of the chart)."
    ).default(None)
    image_pull_secrets: tuple[PullSecret, ...] = SectionList(
        "Secrets in this namespace used to pull the image.",
        item="A reference to one secret.",
        max_items=16,
        keys=("name",),
    ).default(())
    dtype: DType = Choice(
        "Data type of weights and activations. Auto selects the fastest type that the hardware supports well.",
        flags=("dtype",),
    ).default(DType.AUTO)
    block_size: int = Integer(
        "Size of a KV cache block, in tokens.", choices=BLOCK_SIZES, flags=("block-size",)
    ).default(16)
    max_sequences: int = Integer(
        "Maximum number of sequences computed in one step. Further requests wait.", minimum=1, flags=("max-num-seqs",)
    ).default(256)
    max_batched_tokens: int = Integer(
        "Maximum number of tokens computed in one step. Longer prompts are computed in chunks.",
        minimum=1,
        flags=("max-num-batched-tokens",),
    ).default(2048)
    max_model_length: int | None = Integer(
        "Maximum sequence length (prompt + output), in tokens. Default is the model's own limit.",
        minimum=1,
        flags=("max-model-len",),
    ).default(None)
    kv_cache: KVCache = Section(
        "Memory for the KV cache. Default is memoryPercent 90.", is_default_stored=False
    ).default(KVCache())
    prefix_caching: PrefixCaching = Switch(
        "Whether requests with a common prefix share its KV cache blocks.",
        flags=("enable-prefix-caching", "no-enable-prefix-caching"),
    ).default(PrefixCaching.ENABLED)
    resumable: Resumable = OptIn(
        "Whether the gateway continues a stream on another replica if its own dies or terminates. The gateway "
        "keeps the request and the tokens until the stream ends. Useful with two or more replicas.",
        flags=("resumable-streams",),
    ).default(Resumable.DISABLED)
    scheduling_policy: SchedulingPolicy = Choice(
        "Order of waiting requests. FCFS serves them in order of arrival. Priority serves the lowest priority "
        "value first. Fair serves the tenant (API key, of the engine or else of the gateway) that has received "
        "the fewest tokens.",
        flags=("scheduling-policy",),
    ).default(SchedulingPolicy.FCFS)
    preemption: Preemption = Choice(
        "What happens to a running sequence when the KV cache is full. Recompute frees its blocks and computes "
        "them again later. Swap moves them to swapSpace. Auto chooses the option with the lower measured cost.",
        flags=("preemption-mode",),
    ).default(Preemption.AUTO)
    swap_space_bytes: int = ByteSize(
        "Host memory for the blocks of preempted sequences, such as 4Gi. On a CPU it shares the memory of the KV "
        "cache. Default is no swap space.",
        minimum=0,
        is_default_stored=False,
        flags=("swap-space-bytes",),
    ).default(0)
    speculation: Speculation | None = Section(
        "Speculative decoding. Answers are the same as without it, and need fewer steps if they repeat "
        "their prompt, or if a draft model predicts them."
    ).default(None)
    adapters: AdapterSlots | None = Section(
        "Room for LoRA adapters, which LLMAdapters add and remove while replicas run. Without it, replicas serve "
        "no adapters. For model families that quire implements itself.",
        flags=("enable-lora", "no-enable-lora", "adapters-file"),
    ).default(None)
    extra_args: tuple[str, ...] = Arguments(
        "Additional engine flags; `quire-engine --flag-schema` lists them. Flags that quire sets itself are rejected."
    ).default(())

    RULES: ClassVar = (
        Rule(
            at="maxBatchedTokens",
            # has(): the server evaluates this rule on the default of `engine`, before the defaults of its fields.
            cel="!has(self.maxSequences) || !has(self.maxBatchedTokens) || self.maxBatchedTokens >= self.maxSequences",
            holds=lambda engine, document: engine.max_batched_tokens >= engine.max_sequences,
            message="must be at least maxSequences: each sequence uses one token of a step",
        ),
        Rule(
            at="preemption",
            cel="!has(self.preemption) || self.preemption != 'Swap' || (has(self.swapSpace) "
            "&& isQuantity(string(self.swapSpace)) "
            "&& quantity(string(self.swapSpace)).compareTo(quantity('0')) > 0)",
            holds=lambda engine, document: engine.preemption is not Preemption.SWAP or engine.swap_space_bytes > 0,
            message="Swap requires swapSpace: set swapSpace, for example to 4Gi, or use Auto",
        ),
        Rule(
            at="speculation.maxTokens",
            cel="!has(self.speculation) || !has(self.speculation.maxTokens) "
            "|| self.speculation.maxTokens < (has(self.blockSize) ? self.blockSize : 16)",
            holds=lambda engine, document: (
                engine.speculation is None
                or engine.speculation.max_tokens is None
                or engine.speculation.max_tokens < engine.block_size
            ),
            message="must be less than blockSize: lower it, or raise blockSize",
        ),
    )

    @property
    def invents_weights(self) -> bool:
        """True if weights are random, for trials without the real ones."""
        return self._says("load-format", "dummy")

    @property
    def kv_cache_in_fp8(self) -> bool:
        """True if keys and values have one byte each."""
        return self._says("kv-cache-dtype", "fp8")

    @property
    def quantization(self) -> Literal["int8", "fp8"] | None:
        """The format of the weights of linear layers, of one byte each; None if they are not quantized."""
        formats: tuple[Literal["int8", "fp8"], ...] = ("int8", "fp8")
        return next((name for name in formats if self._says("quantization", name)), None)

    def _says(self, flag: str, value: str) -> bool:
        return f"--{flag}={value}" in self.extra_args or (f"--{flag}", value) in pairwise(self.extra_args)


_WHOLE_GPUS = tuple(
    Rule(
        cel=f"!('{name}' in self) || quantity(string(self['{name}'])).isInteger()",
        message=f"{name} must be a whole number",
    )
    for name in GPU_RESOURCES
)
_WITH_ANY = (
    "(has(self.{field}) && '{name}' in self.{field} "
    "&& quantity(string(self.{field}['{name}'])).compareTo(quantity('0')) != 0)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources of the engine's container, with the quantities as the user wrote them."""

    limits: Mapping[str, str] = Quantities("Maximum amount of each resource.", rules=_WHOLE_GPUS).default({})
    requests: Mapping[str, str] = Quantities(
        "Reserved amount of each resource. Default is the limit.", rules=_WHOLE_GPUS
    ).default({})

    RULES: ClassVar = (
        Rule(
            at="limits",
            cel=" || ".join(
                f"!({' || '.join(_WITH_ANY.format(field=field, name=name) for field in ('limits', 'requests'))})"
                for name in GPU_RESOURCES
            ),
            message="has nvidia.com/gpu and amd.com/gpu, and a replica uses GPUs of one kind: remove one of them, also "
            "from requests",
        ),
    )

    def check(self, document: Fields) -> None:
        """Refuse GPUs of several kinds, and devices that the engine would leave unused while it runs on the CPU."""
        kinds = list(self._gpus)
        if len(kinds) > 1:
            message = f"has {' and '.join(kinds)}, and a replica uses GPUs of one kind: keep one, also in requests"
            document.problem("limits", message)
        for field_name, amounts in (("limits", self.limits), ("requests", self.requests)):
            for name in filter(_OTHER_DEVICES.fullmatch, amounts):
                message = f"{name} is a device that the engine does not use: request a GPU of NVIDIA or amd.com/gpu"
                document.problem(field_name, message)

    @property
    def _gpus(self) -> dict[str, int]:
        """The number of GPUs by resource, without resources whose number is 0."""
        names = filter(is_gpu, {**self.limits, **self.requests})
        counts = {name: max(int(amounts.get(name, "0")) for amounts in (self.limits, self.requests)) for name in names}
        return {name: count for name, count in counts.items() if count}

    @property
    def gpus(self) -> int:
        """The number of GPUs of one pod, which are of one kind. A MIG slice and a shared GPU count as one."""
        return max(self._gpus.values(), default=0)

    @property
    def on_amd(self) -> bool:
        """True if the replica's GPUs are AMD's."""
        return AMD_GPU in self._gpus

    @property
    def has_parts_of_gpus(self) -> bool:
        """True if the GPUs are MIG slices or shared, so that ranks may be on one GPU, which NCCL refuses."""
        return any(name not in GPU_RESOURCES for name in self._gpus)

    @property
    def mig_profile(self) -> str | None:
        """The profile of the MIG slice, such as 3g.40gb; None without one."""
        found = filter(None, map(_MIG.fullmatch, self._gpus))
        return next((match["profile"] for match in found), None)

    @property
    def mig_memory_bytes(self) -> int | None:
        """The memory that the name of the MIG profile contains, which is at least the actual one; None if unknown."""
        named = _MIG_MEMORY.fullmatch(self.mig_profile or "")
        return None if named is None else int(named["gigabytes"]) * 2**30

    @property
    def cpu_limit(self) -> Fraction | None:
        limit = self.limits.get("cpu")
        return None if limit is None else parse_quantity(limit)

    @property
    def memory_limit_bytes(self) -> int | None:
        limit = self.limits.get("memory")
        return None if limit is None else parse_bytes(limit)
