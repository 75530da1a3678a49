"""The share of this machine for each local replica: memory, threads, a GPU. It is decided before anything starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire_cli.errors import CapacityProblem
from quire_cli.local.machine import Machine
from quire_common.kv_size import CacheLimits
from quire_common.quantities import format_bytes
from quire_operator.domain.capacity import fit as capacity
from quire_operator.domain.capacity.fit import Fits, Footprint, TooSmall
from quire_operator.domain.capacity.kv_groups import sequence_bytes
from quire_operator.domain.capacity.model_config import ModelFacts
from quire_operator.domain.capacity.remedies import remedies
from quire_operator.domain.resource import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The share of this machine for one replica."""

    memory_bytes: int
    threads: int
    gpus: int
    """GPUs of this machine, of which the replica uses one; 0 means the CPU."""

    @property
    def on_gpu(self) -> bool:
        return self.gpus > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """An LLMDeployment that fits."""

    spec: Spec
    folder: Path
    share: Share
    needs: Footprint
    limits: CacheLimits
    fits: Fits

    @property
    def kv_cache_bytes(self) -> int | None:
        """The size that the engine allocates; None on a GPU of its own, where the engine measures it."""
        return None if self.share.on_gpu else capacity.useful_kv_cache_bytes(self.fits, self.needs, self.limits)


def share_of(spec: Spec, specs: Sequence[Spec], machine: Machine) -> Share:
    """Return a replica's share: all possible replicas divide CPUs and memory, and a GPU belongs to one replica."""
    if spec.resources.gpus:
        return Share(memory_bytes=_gpu_memory(specs, machine), threads=1, gpus=len(machine.gpu_memory_bytes))
    replicas = replicas_on_cpus(specs)
    return Share(memory_bytes=machine.memory_bytes // replicas, threads=max(1, machine.cpus // replicas), gpus=0)


def replicas_on_cpus(specs: Sequence[Spec]) -> int:
    """Return the largest possible number of replicas that share CPUs and memory."""
    return max(1, sum(spec.max_replicas for spec in specs if not spec.resources.gpus))


def size(spec: Spec, facts: ModelFacts, *, folder: Path, share: Share, machine: Machine) -> Sized:
    """Return the spec with its share, or raise CapacityProblem with possible remedies."""
    needs, limits = measure(spec, facts, on_gpu=share.on_gpu, multiplies_bfloat16=machine.multiplies_bfloat16)
    fits = capacity.fit(spec, needs, limits, memory_bytes=share.memory_bytes)
    if isinstance(fits, TooSmall):
        raise CapacityProblem(
            f"{spec.name} does not fit: a replica may use {format_bytes(share.memory_bytes)} "
            f"and needs {format_bytes(fits.needed_bytes)}",
            details=[
                f"weights {format_bytes(needs.weight_bytes)} ({needs.weight_dtype}), "
                f"working space {format_bytes(needs.workspace_bytes)}",
                f"KV cache {format_bytes(sequence_bytes(needs.kv_groups, limits))} for one sequence of "
                f"{limits.sequence_tokens:,} tokens; {format_bytes(fits.kv_cache_bytes)} are left",
            ],
            hint="; ".join(remedies(spec, needs, limits, fits, shared=not share.on_gpu)),
        )
    return Sized(spec=spec, folder=folder, share=share, needs=needs, limits=limits, fits=fits)


def measure(spec: Spec, facts: ModelFacts, *, on_gpu: bool, multiplies_bfloat16: bool) -> tuple[Footprint, CacheLimits]:
    """Return the needs of one replica and the limits of the spec; raise CapacityProblem for too long sequences."""
    most = facts.config.max_positions
    asked = spec.engine.max_model_length
    if asked is not None and most is not None and asked > most:
        raise CapacityProblem(
            f"{spec.name}: spec.engine.maxModelLength is {asked:,}, but the model supports {most:,} tokens",
            hint=f"set it to {most} or less, or remove it",
        )
    device: capacity.Device = "gpu" if on_gpu else "cpu"
    return capacity.measure(spec, facts, device=device, cpu_multiplies_bfloat16=multiplies_bfloat16)


def _gpu_memory(specs: Sequence[Spec], machine: Machine) -> int:
    wanted = sum(other.max_replicas for other in specs if other.resources.gpus)
    found = len(machine.gpu_memory_bytes)
    if wanted > found:
        has = "none" if found == 0 else f"only {found}"
        raise CapacityProblem(
            f"{wanted} replicas need a GPU each (spec.resources), but nvidia-smi shows {has} on this machine",
            hint="remove spec.resources to run on the CPU, or use fewer replicas",
        )
    return min(machine.gpu_memory_bytes)
