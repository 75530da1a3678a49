"""Changes of a spec that make a model fit, for ``quire plan``, ``quire up`` and the operator's capacity check."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from quire_common import kv_size, model_memory
from quire_common.kv_size import CacheGroup, CacheLimits, bytes_by_window, kv_bytes_per_token
from quire_common.model_memory import DTYPE_BYTES, DTypeName, ModelConfig, ModelFacts, compute_dtype
from quire_common.quantities import format_bytes
from quire_operator.api import DType, Parallelism, Spec
from quire_operator.api.engine import MAX_SIZE


def parallelism_problem(shape: Parallelism, config: ModelConfig) -> str | None:
    """Return why the model cannot be divided as ``spec.parallelism`` says, or None; the engine has the same rules."""
    if config.layers % shape.pipeline:
        fits = max(size for size in range(1, shape.pipeline) if config.layers % size == 0)
        return (
            f"spec.parallelism.pipeline: must divide the {config.layers} layers of the model, got {shape.pipeline}; "
            f"set it to {fits}"
        )
    rule = _broken_rule(config, shape.tensor)
    if rule is None:
        return None
    fits = max(size for size in range(1, min(shape.tensor, MAX_SIZE)) if _broken_rule(config, size) is None)
    return f"spec.parallelism.tensor: must {rule}, got {shape.tensor}; set it to {fits}"


def _broken_rule(config: ModelConfig, tensor: int) -> str | None:
    if config.heads % tensor:
        return f"divide the {config.heads} attention heads of the model"
    if config.kv_heads % tensor and tensor % config.kv_heads:
        return f"divide the {config.kv_heads} KV heads of the model or be a multiple of them"
    if config.intermediate_size % tensor:
        return f"divide the intermediate size {config.intermediate_size} of the model"
    return None


def kv_copies(config: ModelConfig, shape: Parallelism) -> int:
    """Return the number of ranks that keep the same KV head."""
    return max(1, shape.tensor // config.kv_heads)


def table_bytes(config: ModelConfig, width: int) -> int:
    """Return the size of the embedding table with numbers of ``width`` bytes; the LM head has the same size."""
    return config.vocab_size * config.hidden_size * width


def uneven_bytes(shape: Parallelism, config: ModelConfig, width: int, *, parts: int) -> int:
    """Return by how much the weights of the largest of ``parts`` exceed their mean: the pods of a group, or the GPUs.

    Layers are divided evenly; the two tables are in the first and in the last stage.
    """
    if shape.pipeline == 1 or parts == 1:
        return 0
    table = table_bytes(config, width)
    largest = table * min(shape.ranks // parts, shape.tensor) // shape.tensor
    return max(0, largest - 2 * table // parts)


Device = Literal["gpu", "cpu"]

_CPU_RUNTIME_BYTES = 900 * 10**6
"""The memory of a rank's process without weights and KV cache, most of it torch itself."""
_GPU_RUNTIME_BYTES = 2**30
"""CUDA context, workspaces of libraries, and captured graphs or NCCL's buffers, of each GPU."""
_LOGITS_COPIES = 2
"""Float32 logits of every sequence, and a copy while tokens are sampled."""
_FP8_BYTES = 1
_QUANTIZED_BYTES = 1
_DTYPES: Mapping[DType, Literal["auto"] | DTypeName] = {
    DType.AUTO: "auto",
    DType.FLOAT32: "float32",
    DType.FLOAT16: "float16",
    DType.BFLOAT16: "bfloat16",
}
_RANK_UNIT = 8
"""Slots have room for a multiple of this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory that one replica needs before its KV cache has any tokens."""

    dtype: DTypeName
    parameters: int
    weight_bytes: int
    workspace_bytes: int
    """The runtime and the activations of the largest step; an estimate."""
    swap_bytes: int
    """Swap space in the same memory as the weights; 0 on a GPU, where it is in host memory."""
    kv_groups: Mapping[int | None, int]
    """Bytes per token of the layers with each window; None is full attention."""
    draft_bytes: int = 0
    """The weights of the draft model or head, and the hidden states kept for a head; its layers' keys and values are in
    ``kv_groups``."""
    without_draft: "Footprint | None" = None
    """The needs without the draft model, if there is one."""
    adapter_bytes: int = 0
    """The slots of adapters, and the adapters in host memory where that is the same memory."""
    kv_in_fp8: bool = False
    quantization: str | None = None
    """The format of the weights of matrix products if they are quantized. Embeddings keep ``dtype``."""

    @property
    def weight_dtype(self) -> str:
        return self.quantization or self.dtype

    @property
    def kv_dtype(self) -> str:
        return "fp8" if self.kv_in_fp8 else self.dtype

    @property
    def kv_width(self) -> int:
        """Bytes per number in the KV cache."""
        return _FP8_BYTES if self.kv_in_fp8 else DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes per token that all layers keep."""
        return sum(self.kv_groups.values())

    @property
    def base_bytes(self) -> int:
        """Everything except the KV cache."""
        return self.weight_bytes + self.draft_bytes + self.workspace_bytes + self.swap_bytes + self.adapter_bytes

    def cache_groups(self, limits: CacheLimits) -> list[CacheGroup]:
        """Return the groups in blocks. A window no shorter than the longest sequence counts as full attention."""
        sums: dict[int | None, int] = {}
        for window, size in self.kv_groups.items():
            own = window if window is not None and window < limits.sequence_tokens else None
            sums[own] = sums.get(own, 0) + size * limits.block_size
        return [CacheGroup(block_bytes=size, window=window) for window, size in sums.items()]

    def sequence_bytes(self, limits: CacheLimits) -> int:
        """Return the smallest cache that holds one sequence of the longest length."""
        return kv_size.sequence_bytes(self.cache_groups(limits), limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    kv_cache_bytes: int
    kv_tokens: int
    sequences: int
    """The number of sequences of the longest length at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TooSmall:
    """One replica does not run in this memory; the fields say what would fit."""

    kv_cache_bytes: int
    """The bytes left for the KV cache; 0 if not even the weights fit."""
    needed_bytes: int
    """The memory in which one sequence of the longest length fits."""
    longest_sequence_tokens: int
    """The longest sequence that fits without a change; 0 if none fits."""
    fits_without_draft: bool = False
    """True if the replica would run without its draft model."""


def footprint(
    spec: Spec,
    config: ModelConfig,
    *,
    parameters: int,
    dtype: DTypeName,
    device: Device,
    draft: ModelFacts | None = None,
) -> Footprint:
    """Return the needs of one replica. ``parameters`` is counted in the files, or ``config.parameters``."""
    width = DTYPE_BYTES[dtype]
    in_fp8, copies = spec.engine.kv_cache_in_fp8, kv_copies(config, spec.parallelism)
    workspace = _CPU_RUNTIME_BYTES * spec.parallelism.ranks
    if device == "gpu":
        workspace = _gpu_workspace(spec, config, width)

    def weights(config: ModelConfig, parameters: int) -> int:
        return _quantized_bytes(config, parameters, width) if spec.engine.quantization else parameters * width

    # The layers of a draft model keep their part of each block of the target.
    layers = [config, *([] if draft is None else [draft.config])]
    return Footprint(
        dtype=dtype,
        parameters=parameters,
        weight_bytes=weights(config, parameters) + _second_table(spec, config, width),
        draft_bytes=0 if draft is None else weights(draft.config, draft.parameters),
        without_draft=None
        if draft is None
        else footprint(spec, config, parameters=parameters, dtype=dtype, device=device),
        workspace_bytes=workspace,
        swap_bytes=spec.engine.swap_space_bytes if device == "cpu" else 0,
        kv_groups=bytes_by_window(
            [window for model in layers for window in model.windows],
            [
                kv_bytes_per_token(
                    layers=1, kv_heads=copies, head_dim=kv_width, dtype_bytes=_FP8_BYTES if in_fp8 else width
                )
                for model in layers
                for kv_width in model.kv_widths
            ],
        ),
        adapter_bytes=_adapter_bytes(spec, config, width, device),
        kv_in_fp8=in_fp8,
        quantization=spec.engine.quantization,
    )


def _gpu_workspace(spec: Spec, config: ModelConfig, width: int) -> int:
    """Return the runtime and the activations of the largest step on all GPUs of a replica.

    A client may request the logprobs of every prompt token, and each then has logits. Feed-forward layers are divided
    among the ranks of a stage; each rank has all logits, and gathers them from a second copy. Stages before the last
    one have no logits, but the last one sets the size of the KV cache, so each counts as the last one.
    """
    ranks, stages = spec.parallelism.ranks, spec.parallelism.pipeline
    logits_copies = 1 if spec.parallelism.tensor == 1 else 2
    feed_forward = 3 * config.intermediate_size * stages
    per_token = ranks * (2 * config.hidden_size + logits_copies * config.vocab_size) + feed_forward
    sampling = spec.engine.max_sequences * config.vocab_size * 4 * _LOGITS_COPIES
    return ranks * (_GPU_RUNTIME_BYTES + sampling) + spec.engine.max_batched_tokens * per_token * width


def _second_table(spec: Spec, config: ModelConfig, width: int) -> int:
    """Return the bytes of a tied embedding table in the last of several stages, which needs it as LM head."""
    is_copied = config.tied_embeddings and spec.parallelism.pipeline > 1
    return table_bytes(config, width) if is_copied else 0


def _adapter_bytes(spec: Spec, config: ModelConfig, width: int, device: Device) -> int:
    """Return the bytes of all slots, and on a CPU also of the adapters in host memory, each of the highest rank."""
    slots = spec.engine.adapters
    if slots is None:
        return 0
    in_slots = -(-slots.max_rank // _RANK_UNIT) * _RANK_UNIT * slots.max_loaded
    in_host_memory = slots.max_rank * slots.in_memory if device == "cpu" else 0
    return (in_slots + in_host_memory) * config.adapter_width * width


def _quantized_bytes(config: ModelConfig, parameters: int, width: int) -> int:
    """Return the bytes of int8 or fp8 weights. The embedding table keeps its dtype; a tied head adds a copy of it."""
    table = config.vocab_size * config.hidden_size
    multiplied = parameters if config.tied_embeddings else max(0, parameters - table)
    return table * width + multiplied * _QUANTIZED_BYTES


def limits(spec: Spec, config: ModelConfig) -> CacheLimits:
    """Return the limits of the spec, with the model's own length if the spec sets none."""
    return CacheLimits(
        sequence_tokens=spec.engine.max_model_length or config.max_positions or 2048,
        max_sequences=spec.engine.max_sequences,
        max_batched_tokens=spec.engine.max_batched_tokens,
        block_size=spec.engine.block_size,
    )


def draft_problems(spec: Spec, target: ModelConfig, draft: ModelConfig) -> list[str]:
    """Return the reasons against the draft model, which the engine would find only after both downloads.

    The engine also compares the tokenizers.
    """
    return model_memory.draft_problems(
        target_vocab_size=target.vocab_size,
        draft_vocab_size=draft.vocab_size,
        target_positions=spec.engine.max_model_length or target.max_positions,
        draft_positions=draft.max_positions,
        has_windows={*target.windows, *draft.windows} != {None},
        remedy=f"set spec.engine.maxModelLength to {draft.max_positions} or less",
    )


def memory_of_parts(spec: Spec, config: ModelConfig, dtype: DTypeName, part_bytes: int, *, parts: int) -> int:
    """Return the memory of a replica in so many parts, less what the largest one needs more.

    The parts are its pods, or its GPUs, which have ``part_bytes`` each.
    """
    uneven = uneven_bytes(spec.parallelism, config, DTYPE_BYTES[dtype], parts=parts)
    return max(0, part_bytes - uneven) * parts


def measure(
    spec: Spec, facts: ModelFacts, *, device: Device, cpu_multiplies_bfloat16: bool, draft: ModelFacts | None = None
) -> tuple[Footprint, CacheLimits]:
    """Return the needs of one replica and the limits of the spec. Without ``draft``, no draft model is counted."""
    dtype = compute_dtype(
        _DTYPES[spec.engine.dtype],
        facts.config.dtype,
        device=device,
        cpu_multiplies_bfloat16=cpu_multiplies_bfloat16,
        quantization=spec.engine.quantization,
    )
    needs = footprint(spec, facts.config, parameters=facts.parameters, dtype=dtype, device=device, draft=draft)
    return needs, limits(spec, facts.config)


def fit(spec: Spec, needs: Footprint, asked: CacheLimits, *, memory_bytes: int) -> Fits | TooSmall:
    """Return what one replica can keep in ``memory_bytes``."""
    base = needs.base_bytes
    groups, one_sequence = needs.cache_groups(asked), needs.sequence_bytes(asked)
    cache = spec.engine.kv_cache
    if cache.size_bytes is not None:
        size = cache.size_bytes
        available = size if base + size <= memory_bytes else max(0, memory_bytes - base)
        enough = base + size <= memory_bytes and size >= one_sequence
        needed = base + max(size, one_sequence)
    else:
        available = max(0, memory_bytes * cache.memory_percent // 100 - base)
        enough = available >= one_sequence
        needed = -(-(base + one_sequence) * 100 // cache.memory_percent)
    tokens, sequences = kv_size.capacity(available, groups, asked)
    if not enough:
        alone = needs.without_draft
        return TooSmall(
            fits_without_draft=alone is not None
            and isinstance(fit(spec, alone, asked, memory_bytes=memory_bytes), Fits),
            kv_cache_bytes=available,
            needed_bytes=needed,
            longest_sequence_tokens=min(tokens, asked.sequence_tokens),
        )
    return Fits(kv_cache_bytes=available, kv_tokens=tokens, sequences=sequences)


def useful_kv_cache_bytes(fits: Fits, needs: Footprint, asked: CacheLimits) -> int:
    """Return the size of the cache to allocate: at most what all sequences together can fill."""
    return min(fits.kv_cache_bytes, kv_size.most_bytes(needs.cache_groups(asked), asked))


_TENSOR_SIZES = (2, 4, 8)
"""The usual numbers of GPUs of one machine."""


def remedies(spec: Spec, needs: Footprint, limits: CacheLimits, small: TooSmall, *, shared: bool) -> list[str]:
    """Return changes, each of which is sufficient. ``shared`` is True if all replicas use the same memory."""
    advice: list[str] = []
    one_sequence = needs.sequence_bytes(limits)
    size = spec.engine.kv_cache.size_bytes
    if size is not None and small.kv_cache_bytes >= one_sequence:
        mebibytes = small.kv_cache_bytes // 2**20
        advice.append(f"lower spec.engine.kvCache.size to {mebibytes}Mi")
    elif size is not None and size < one_sequence:
        advice.append(f"raise spec.engine.kvCache.size to {-(-one_sequence // 2**20)}Mi")
    if 0 < small.longest_sequence_tokens < limits.sequence_tokens:
        advice.append(f"set spec.engine.maxModelLength to {small.longest_sequence_tokens} or less")
    if small.fits_without_draft:
        advice.append("remove spec.engine.speculation, whose draft model needs memory")
    if shared and spec.max_replicas > 1:
        field = "spec.autoscaling.maxReplicas" if spec.autoscaling else "spec.replicas"
        advice.append(f"lower {field}, because the replicas share the memory")
    return [*advice, f"give a replica {format_bytes(small.needed_bytes)}"]


def gpus_that_fit(spec: Spec, facts: ModelFacts, *, gpu_bytes: int) -> int | None:
    """Return how many GPUs of ``gpu_bytes`` each would run the model, if they are more than now and one machine's.

    Return None if none of the usual numbers does, if ranks exclude another field of the spec or its kind of GPU, or if
    the spec has stages or several pods, whose numbers a user has chosen.
    """
    if spec.parallelism.pipeline > 1 or spec.parallelism.is_group:
        return None
    if spec.engine.adapters is not None or spec.draft is not None or spec.resources.has_parts_of_gpus:
        return None
    for tensor in _TENSOR_SIZES:
        divided = replace(spec, parallelism=Parallelism(tensor=tensor))
        if tensor <= spec.parallelism.tensor or parallelism_problem(divided.parallelism, facts.config) is not None:
            continue
        needs, limits = measure(divided, facts, device="gpu", cpu_multiplies_bfloat16=True)
        if isinstance(fit(divided, needs, limits, memory_bytes=tensor * gpu_bytes), Fits):
            return tensor
    return None
