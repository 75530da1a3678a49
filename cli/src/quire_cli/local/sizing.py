"""The share of this machine for each local replica: memory, threads, GPUs. It is decided before anything starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire_cli.errors import CapacityProblem
from quire_cli.local.machine import Machine
from quire_common.kv_size import CacheLimits
from quire_common.model_memory import ModelFacts
from quire_common.quantities import format_bytes
from quire_operator.domain.capacity import fit as capacity
from quire_operator.domain.capacity.fit import Fits, Footprint, TooSmall, draft_problems
from quire_operator.domain.capacity.ranks import parallelism_problem
from quire_operator.domain.capacity.remedies import remedies
from quire_operator.domain.resource import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The share of this machine for one replica."""

    memory_bytes: int
    threads: int
    """The compute threads of the replica, of which each rank needs one."""
    gpus: tuple[int, ...] = ()
    """The GPUs of this machine for all replicas of the LLMDeployment, one for each of their ranks; empty means the
    CPU."""

    @property
    def on_gpu(self) -> bool:
        return bool(self.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """An LLMDeployment that fits."""

    spec: Spec
    folder: Path
    share: Share
    needs: Footprint
    limits: CacheLimits
    fits: Fits
    draft_folder: Path | None = None
    """The draft model; None without one, or if an optional one is unavailable."""

    @property
    def kv_cache_bytes(self) -> int | None:
        """The size that the engine allocates; None on a GPU of its own, where the engine measures it."""
        return None if self.share.on_gpu else capacity.useful_kv_cache_bytes(self.fits, self.needs, self.limits)


def share_of(spec: Spec, specs: Sequence[Spec], machine: Machine) -> Share:
    """Return a replica's share: all possible replicas divide CPUs and memory, and a GPU belongs to one rank of one."""
    if spec.resources.gpus:
        kind = [other for other in specs if other.resources.on_amd == spec.resources.on_amd]
        memory = _gpu_memory(kind, machine)
        first = sum(_gpus(other) for other in kind[: kind.index(spec)])
        return Share(
            memory_bytes=memory * spec.gpus_per_replica,
            threads=spec.parallelism.ranks,
            gpus=tuple(range(first, first + _gpus(spec))),
        )
    replicas = replicas_on_cpus(specs)
    threads = max(spec.parallelism.ranks, machine.cpus // replicas)
    return Share(memory_bytes=machine.memory_bytes // replicas, threads=threads)


def replicas_on_cpus(specs: Sequence[Spec]) -> int:
    """Return the largest possible number of replicas that share CPUs and memory."""
    return max(1, sum(spec.max_replicas for spec in specs if not spec.resources.gpus))


def size(
    spec: Spec,
    facts: ModelFacts,
    *,
    folder: Path,
    share: Share,
    machine: Machine,
    draft: tuple[Path, ModelFacts] | None = None,
) -> Sized:
    """Return the spec with its share, or raise CapacityProblem with possible remedies.

    A draft model that does not fit and is not required is left out.
    """
    needs, limits = measure(
        spec,
        facts,
        on_gpu=share.on_gpu,
        multiplies_bfloat16=machine.multiplies_bfloat16,
        draft=None if draft is None else draft[1],
    )
    fits = capacity.fit(spec, needs, limits, memory_bytes=share.memory_bytes)
    if isinstance(fits, TooSmall) and fits.fits_without_draft and not _needs_draft(spec):
        return size(spec, facts, folder=folder, share=share, machine=machine)
    if isinstance(fits, TooSmall):
        raise CapacityProblem(
            f"{spec.name} does not fit: a replica may use {format_bytes(share.memory_bytes)} "
            f"and needs {format_bytes(fits.needed_bytes)}",
            details=[
                f"weights {format_bytes(needs.weight_bytes)} ({needs.weight_dtype}), "
                + (f"draft model {format_bytes(needs.draft_bytes)}, " if needs.draft_bytes else "")
                + f"working space {format_bytes(needs.workspace_bytes)}",
                f"KV cache {format_bytes(needs.sequence_bytes(limits))} for one sequence of "
                f"{limits.sequence_tokens:,} tokens; {format_bytes(fits.kv_cache_bytes)} are left",
            ],
            hint="; ".join(remedies(spec, needs, limits, fits, shared=not share.on_gpu)),
        )
    return Sized(
        spec=spec,
        folder=folder,
        share=share,
        needs=needs,
        limits=limits,
        fits=fits,
        draft_folder=None if draft is None else draft[0],
    )


def measure(
    spec: Spec, facts: ModelFacts, *, on_gpu: bool, multiplies_bfloat16: bool, draft: ModelFacts | None = None
) -> tuple[Footprint, CacheLimits]:
    """Return the needs of one replica and the limits of the spec.

    Raise CapacityProblem for too long sequences, for a draft model that does not suit the model, and for a model that
    cannot be divided among the ranks.
    """
    if (problem := parallelism_problem(spec.parallelism, facts.config)) is not None:
        raise CapacityProblem(f"{spec.name}: {problem}")
    most = facts.config.max_positions
    asked = spec.engine.max_model_length
    if asked is not None and most is not None and asked > most:
        raise CapacityProblem(
            f"{spec.name}: spec.engine.maxModelLength is {asked:,}, but the model supports {most:,} tokens",
            hint=f"set it to {most} or less, or remove it",
        )
    problems = [] if draft is None else draft_problems(spec, facts.config, draft.config)
    if problems and _needs_draft(spec):
        raise CapacityProblem(
            f"{spec.name}: spec.engine.speculation.draft.source cannot serve as draft model",
            details=problems,
            hint="choose another draft model, or remove spec.engine.speculation",
        )
    device: capacity.Device = "gpu" if on_gpu else "cpu"
    return capacity.measure(spec, facts, device=device, cpu_multiplies_bfloat16=multiplies_bfloat16, draft=draft)


def _needs_draft(spec: Spec) -> bool:
    return spec.engine.speculation is not None and spec.engine.speculation.required


def _gpu_memory(specs: Sequence[Spec], machine: Machine) -> int:
    """Return the memory of the smallest GPU for ``specs``, which all use GPUs of one kind, or none."""
    wanted = sum(_gpus(other) for other in specs)
    on_amd = any(spec.resources.on_amd for spec in specs)
    sizes = machine.amd_memory_bytes if on_amd else machine.gpu_memory_bytes
    witness = "/sys/class/drm" if on_amd else "nvidia-smi"
    found = len(sizes)
    if wanted > found:
        has, noun = "none" if found == 0 else f"only {found}", "GPU" if wanted == 1 else "GPUs"
        raise CapacityProblem(
            f"the replicas need {wanted} {noun} (spec.resources), but {witness} shows {has} on this machine",
            hint="remove spec.resources to run on the CPU, or use fewer replicas or a smaller spec.parallelism",
        )
    return min(sizes)


def _gpus(spec: Spec) -> int:
    """Return the number of GPUs of an LLMDeployment, with room for a replica if it has none yet."""
    return max(1, spec.max_replicas) * spec.gpus_per_replica
