"""The decision whether a replica fits into its memory and can be divided, before any pod is created: pure.

Unknown values never block a spec, because the engine checks again before it loads.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quire_common.kv_size import CacheLimits
from quire_common.model_memory import DTypeName, ModelConfig, ModelFacts
from quire_common.quantities import format_bytes
from quire_operator.api import HubSource, Source, Spec
from quire_operator.api.fields import JSON, items_of, section_of
from quire_operator.capacity import fit as capacity
from quire_operator.capacity.fit import Footprint, TooSmall, gpus_that_fit, parallelism_problem, remedies
from quire_operator.deployment.conditions import INVALID_SPEC, READY, BlockingCondition
from quire_operator.kube.objects import Resource

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    memory_bytes: int
    has_fp8: bool
    """True for ``--quantization fp8``: from compute capability 8.9 on (Ada, Hopper), and not on AMD in this version."""

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("MI")


GPUS: tuple[Gpu, ...] = tuple(
    Gpu(name=name, memory_bytes=mebibytes * MIB, has_fp8=not name.startswith(("T4", "A10", "MI")))
    for name, mebibytes in (
        ("T4 16GB", 15_360),
        ("A10G 24GB", 23_028),
        ("L4 24GB", 23_034),
        ("RTX 4090 24GB", 24_564),
        ("A100 40GB", 40_960),
        ("L40S 48GB", 46_068),
        ("H100 80GB", 81_559),
        ("A100 80GB", 81_920),
        ("H200 141GB", 143_771),
        ("B200 180GB", 183_359),
        ("MI300X 192GB", 196_592),
        ("MI325X 256GB", 262_128),
        ("MI355X 288GB", 294_896),
    )
)
"""Sorted by memory, the smallest first."""
_MAKERS_AND_SOCKETS = frozenset({"nvidia", "tesla", "geforce", "amd", "instinct", "sxm", "sxm4", "sxm5", "pcie", "oam"})
"""Words in the names of drivers and node labels that do not change which of ``GPUS`` is meant."""


def find_gpu(text: str) -> Gpu | None:
    """Return the GPU that ``text`` names ("H100 80GB", "h100", "NVIDIA-A10G").

    Return None if it is ambiguous or a MIG slice, as in the node label "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb".
    """
    wanted = set(_words(text)) - _MAKERS_AND_SOCKETS
    if "mig" in wanted:
        return None
    exact = [gpu for gpu in GPUS if wanted >= set(_words(gpu.name))]
    if len(exact) == 1:
        return exact[0]
    partial = [gpu for gpu in GPUS if wanted and wanted <= set(_words(gpu.name))]
    return partial[0] if len(partial) == 1 else None


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


GPU_MEMORY_LABEL, GPU_PRODUCT_LABEL = "nvidia.com/gpu.memory", "nvidia.com/gpu.product"
"""Labels of NVIDIA's GPU feature discovery; the memory is in MiB."""
AMD_MEMORY_LABEL, AMD_PRODUCT_LABEL = "amd.com/gpu.vram", "amd.com/gpu.product-name"
"""Labels of AMD's node labeller; the memory is in whole GiB, such as 192G, if all GPUs of a node have as much."""
INSUFFICIENT_MEMORY, INSUFFICIENT_GPU_MEMORY = "InsufficientMemory", "InsufficientGPUMemory"
_NOT_APPLIED = frozenset({INSUFFICIENT_MEMORY, INSUFFICIENT_GPU_MEMORY, INVALID_SPEC})
_HUB_VARIABLE = "HF_ENDPOINT"

Labels = Mapping[str, str]
"""The labels of one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMemory:
    size_bytes: int
    """The memory of one of its pods; of GPUs, that of all in the pod."""
    on_gpu: bool
    where: str
    """The memory's name in a sentence."""


def hub_source(spec: Spec) -> HubSource | None:
    """Return the model if its facts are public: it is on the operator's hub and needs no credentials."""
    return _public(spec, spec.model.source, spec.model.credentials_secret)


def draft_hub_source(spec: Spec) -> HubSource | None:
    """Return the draft model if there is one and its facts are public."""
    return None if spec.draft is None else _public(spec, spec.draft.source, spec.draft.credentials_secret)


def _public(spec: Spec, source: Source, secret: str | None) -> HubSource | None:
    if not isinstance(source, HubSource) or secret is not None:
        return None
    return None if _HUB_VARIABLE in repr(spec.pod_template) else source  # the pods use another hub


def replica_memory(spec: Spec, nodes: Sequence[Labels] | None) -> ReplicaMemory | None:
    """Return a pod's memory limit, its MIG slice, or the largest GPUs of the nodes that it admits; None if unknown."""
    if _sets_resources(spec):
        return None
    if (profile := spec.resources.mig_profile) is not None:
        size = spec.resources.mig_memory_bytes
        where = f"a MIG slice {profile}"
        return None if size is None else ReplicaMemory(size_bytes=size, on_gpu=True, where=where)
    if spec.resources.gpus:
        pod = section_of(spec.pod_template, "spec")
        return _largest_gpus(pod, nodes or (), amd=spec.resources.on_amd, count=spec.gpus_per_replica)
    limit = spec.resources.memory_limit_bytes
    where = "spec.resources.limits.memory"
    if spec.parallelism.is_group:
        where = f"that of its {spec.parallelism.nodes} pods together ({where} is that of one)"
    return None if limit is None else ReplicaMemory(size_bytes=limit, on_gpu=False, where=where)


def judge(
    spec: Spec, facts: ModelFacts, memory: ReplicaMemory | None, *, draft: ModelFacts | None = None
) -> BlockingCondition | None:
    """Return in one sentence why the replica cannot run; None if it can according to what is known.

    Without ``memory``, it only checks that the model can be divided among the ranks. A draft model whose facts are
    unknown is not counted.
    """
    if (problem := parallelism_problem(spec.parallelism, facts.config)) is not None:
        return BlockingCondition(reason=INVALID_SPEC, message=problem)
    if memory is None:
        return None
    # Which CPU will run it is unknown, so this assumes the smaller of its possible needs.
    device: capacity.Device = "gpu" if memory.on_gpu else "cpu"
    needs, asked = capacity.measure(spec, facts, device=device, cpu_multiplies_bfloat16=True, draft=draft)
    memory = replace(memory, size_bytes=_of_replica(spec, facts.config, needs.dtype, memory))
    outcome = capacity.fit(spec, needs, asked, memory_bytes=memory.size_bytes)
    if not isinstance(outcome, TooSmall):
        return None
    if outcome.fits_without_draft and spec.engine.speculation is not None and not spec.engine.speculation.required:
        return None  # the engine leaves the draft model out
    reason = INSUFFICIENT_GPU_MEMORY if memory.on_gpu else INSUFFICIENT_MEMORY
    advice = remedies(spec, needs, asked, outcome, shared=False)
    if memory.on_gpu:
        gpu_bytes = memory.size_bytes // spec.parallelism.ranks
        if (count := gpus_that_fit(spec, facts, gpu_bytes=gpu_bytes)) is not None:
            advice.append(f"set spec.parallelism.tensor and the GPUs in spec.resources to {count}")
    return BlockingCondition(reason=reason, message=_sentence(needs, asked, outcome, memory, advice, spec))


def _of_replica(spec: Spec, config: ModelConfig, dtype: DTypeName, memory: ReplicaMemory) -> int:
    """Return the memory of all GPUs or pods of a replica that can be used, because they share the model evenly."""
    if not memory.on_gpu:
        return capacity.memory_of_parts(spec, config, dtype, memory.size_bytes, parts=spec.parallelism.nodes)
    gpus = spec.parallelism.ranks
    return capacity.memory_of_parts(spec, config, dtype, memory.size_bytes // gpus, parts=gpus)


def is_let_in(resource: Resource) -> bool:
    """Return True if the current spec was applied before: then its pods show best whether it fits."""
    ready = _ready(resource)
    return ready is not None and ready.get("reason") not in _NOT_APPLIED


def is_refused(resource: Resource) -> bool:
    """Return True if the last pass refused the current spec, so that it was not applied."""
    ready = _ready(resource)
    return ready is not None and ready.get("reason") in _NOT_APPLIED


def _ready(resource: Resource) -> JSON | None:
    """Return the condition Ready if it is about the current spec."""
    for condition in items_of(resource.status, "conditions"):
        if condition.get("type") == READY:
            return condition if condition.get("observedGeneration") == resource.generation else None
    return None


def _sentence(
    needs: Footprint, asked: CacheLimits, small: TooSmall, memory: ReplicaMemory, advice: Sequence[str], spec: Spec
) -> str:
    share = spec.engine.kv_cache
    filled = f", of which it may fill {share.memory_percent} %" if share.size_bytes is None else ""
    parts = [
        f"weights {format_bytes(needs.weight_bytes)} ({needs.weight_dtype})",
        *([f"draft model {format_bytes(needs.draft_bytes)}"] if needs.draft_bytes else []),
        f"working space {format_bytes(needs.workspace_bytes)}",
        *([f"swap space {format_bytes(needs.swap_bytes)}"] if needs.swap_bytes else []),
        f"KV cache {format_bytes(needs.sequence_bytes(asked))} for one sequence of {asked.sequence_tokens:,} tokens",
    ]
    return (
        f"a replica needs {format_bytes(small.needed_bytes)} and {memory.where} is {format_bytes(memory.size_bytes)}"
        f"{filled}: {', '.join(parts)}; {', or '.join(advice)}"
    )


def _largest_gpus(
    pod: Labels | Mapping[str, object], nodes: Sequence[Labels], *, amd: bool, count: int
) -> ReplicaMemory | None:
    """Return the memory of ``count`` GPUs like the largest one of the nodes that a pod may run on; None if unknown."""
    product_label, memory_of = (AMD_PRODUCT_LABEL, _amd_memory) if amd else (GPU_PRODUCT_LABEL, _gpu_memory)
    wanted = pod.get("nodeSelector")
    admitted = [node for node in nodes if _admits(node, wanted)]
    sizes = [(size, node.get(product_label, "")) for node in admitted if (size := memory_of(node))]
    if not sizes:
        return None
    size, product = max(sizes)
    chosen = "of the nodes that podTemplate selects" if wanted else "of this cluster's nodes"
    where = f"the largest GPU {chosen}{f' ({product})' if product else ''}"
    if count > 1:
        where = f"the memory of {count} GPUs like {where}"
    return ReplicaMemory(size_bytes=count * size, on_gpu=True, where=where)


def _admits(node: Labels, selector: object) -> bool:
    return not isinstance(selector, Mapping) or all(node.get(name) == value for name, value in selector.items())


def _gpu_memory(node: Labels) -> int:
    """Return the GPU memory in bytes; 0 if the node does not report it."""
    text = node.get(GPU_MEMORY_LABEL, "")
    return int(text) * MIB if text.isascii() and text.isdecimal() and len(text) < 12 else 0


def _amd_memory(node: Labels) -> int:
    """Return the memory of the node's AMD GPUs in bytes; 0 if the node does not report it."""
    text = node.get(AMD_MEMORY_LABEL, "").removesuffix("G")
    return int(text) * 1024 * MIB if text.isascii() and text.isdecimal() and len(text) < 9 else 0


def _sets_resources(spec: Spec) -> bool:
    """Return True if the pod template overrides the resources of a container."""
    return any("resources" in container for container in items_of(section_of(spec.pod_template, "spec"), "containers"))
