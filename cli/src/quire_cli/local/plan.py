"""The memory of models, from their configuration alone: one replica's share of this machine, and ``quire plan``.

``share_of`` divides the machine among the replicas before anything starts, ``size`` says whether a model fits its
share. ``places``, ``answers`` and ``render`` show the same for GPUs, pods and amounts of memory.
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire_cli.errors import CapacityProblem, StartProblem
from quire_cli.local.documents import read_manifests
from quire_cli.local.machine import Machine, installed, this_machine, with_tried_cpu
from quire_cli.local.model_store import ModelStore
from quire_cli.options import FileOption, plain_console
from quire_common.contract.engine import ENGINE_COMMAND
from quire_common.kv_size import CacheLimits
from quire_common.model_memory import DTYPE_BYTES, ModelFacts
from quire_common.model_source import cache_home
from quire_common.quantities import format_bytes, parse_bytes
from quire_operator.api import Spec
from quire_operator.capacity import fit as capacity
from quire_operator.capacity.fit import (
    Fits,
    Footprint,
    TooSmall,
    draft_problems,
    gpus_that_fit,
    kv_copies,
    parallelism_problem,
    remedies,
)
from quire_operator.capacity.judge import GPUS, Gpu, find_gpu


def _memory(text: str) -> int:
    size = parse_bytes(text)
    if not size:
        raise typer.BadParameter(f'"{text}" is not an amount of memory such as 24Gi')
    return size


def plan(
    file: FileOption,
    gpu: Annotated[str | None, typer.Option(help='The name of a GPU, such as "H100 80GB".', show_default=False)] = None,
    memory: Annotated[
        int | None,
        typer.Option(help="The memory for one replica.", parser=_memory, metavar="SIZE", show_default=False),
    ] = None,
) -> None:
    """Show the memory a model needs, and how many tokens and sequences fit. Starts no engine.

    Reads the model's configuration and the headers of its weights; downloads no weights. Without --gpu or --memory it
    checks all known GPUs if the spec requests one, else this machine. Exits with 1 if the model fits nowhere.

      quire plan -f llama.yaml --gpu "H100 80GB"

      quire plan -f examples/demo.yaml --memory 4Gi
    """
    if gpu is not None and memory is not None:
        raise typer.BadParameter("set --gpu or --memory, not both")
    machine = this_machine()
    if gpu is None and memory is None:
        with suppress(StartProblem):  # a machine that only plans may have no engine
            machine = asyncio.run(with_tried_cpu(machine, (installed(ENGINE_COMMAND),)))
    store = ModelStore(base=file.resolve().parent, cache=cache_home(os.environ))
    console = plain_console()
    everything_fits = True
    specs = read_manifests(file).deployments
    for spec in specs:
        facts = store.facts(spec.model.source, weights_needed=not spec.engine.invents_weights)
        draft = store.draft_facts(spec)
        where = places(spec, specs, gpu=gpu, memory_bytes=memory, machine=machine)
        found = answers(spec, facts, where, machine=machine, draft=draft)
        everything_fits &= any(answer.fits for answer in found)
        console.print(render(spec, facts, found, draft=draft))
    if not everything_fits:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
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
        first = sum(_num_gpus(other) for other in kind[: kind.index(spec)])
        return Share(
            memory_bytes=memory * spec.gpus_per_replica,
            threads=spec.parallelism.ranks,
            gpus=tuple(range(first, first + _num_gpus(spec))),
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
    wanted = sum(_num_gpus(other) for other in specs)
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


def _num_gpus(spec: Spec) -> int:
    """Return the number of GPUs of an LLMDeployment, with room for a replica if it has none yet."""
    return max(1, spec.max_replicas) * spec.gpus_per_replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place where one replica could run."""

    label: str
    memory_bytes: int
    on_gpu: bool
    divided: bool = False
    """True if it is one replica's share of a memory that all replicas use."""
    nodes: int = 1
    """The number of pods that have the memory together."""
    gpu: Gpu | None = None
    """The kind of its GPUs, if it is known."""
    gpus: int = 1
    """The number of GPUs that have the memory together."""
    cpu: str | None = None
    """The instructions of the machine's CPU that work, if they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    place: Place
    needs: Footprint
    limits: CacheLimits
    outcome: Fits | TooSmall

    @property
    def fits(self) -> bool:
        return isinstance(self.outcome, Fits)


def places(
    spec: Spec, specs: Sequence[Spec], *, gpu: str | None, memory_bytes: int | None, machine: Machine
) -> list[Place]:
    """Return the requested place, else those of the spec: GPUs, the pod's memory limit, its share of this machine.

    ``specs`` are all of the file, because ``quire up`` divides the machine among their replicas.
    """
    if gpu is not None:
        found = find_gpu(gpu)
        if found is None:
            known = ", ".join(each.name for each in GPUS)
            raise CapacityProblem(
                f'"{gpu}" does not name one known GPU', details=[f"known: {known}"], hint="or set --memory"
            )
        if spec.engine.quantization == "int8":
            raise CapacityProblem(
                "--quantization int8 is for CPUs", hint="use fp8 in spec.engine.extraArgs, or do not use --gpu"
            )
        if spec.engine.quantization == "fp8" and not found.has_fp8:
            raise CapacityProblem(
                f"--quantization fp8 needs compute capability 8.9, and {found.name} has less",
                hint="remove it from spec.engine.extraArgs, or name a GPU such as L4, L40S or H100",
            )
        return [_gpus_of(spec, found)]
    on_gpu = spec.resources.gpus > 0
    if memory_bytes is not None:
        label = f"{format_bytes(memory_bytes)} of {'GPU memory' if on_gpu else 'memory'}"
        gpus = max(1, spec.gpus_per_replica)
        return [Place(label=label, memory_bytes=memory_bytes, on_gpu=on_gpu, gpus=gpus)]
    if (profile := spec.resources.mig_profile) is not None:
        size = spec.resources.mig_memory_bytes
        if size is None:
            problem = f"the memory of a MIG slice {profile} is not known"
            raise CapacityProblem(problem, hint="set --memory to the memory of the slice")
        return [Place(label=f"MIG slice {profile}", memory_bytes=size, on_gpu=True)]
    if on_gpu:
        return [_gpus_of(spec, each) for each in _usable_gpus(spec)]
    limit = spec.resources.memory_limit_bytes
    nodes = spec.parallelism.nodes
    limits = "a pod's memory limit" if nodes == 1 else f"{nodes} pods' memory limits"
    pod = [] if limit is None else [Place(label=limits, memory_bytes=limit * nodes, on_gpu=False, nodes=nodes)]
    replicas = replicas_on_cpus(specs)
    label = "this machine" if replicas == 1 else f"this machine ÷ {replicas} replicas"
    return [
        *pod,
        Place(label=label, memory_bytes=machine.memory_bytes // replicas, on_gpu=False, divided=True, cpu=machine.cpu),
    ]


def _gpus_of(spec: Spec, gpu: Gpu) -> Place:
    """Return as many GPUs of one kind as a replica has ranks."""
    count = spec.parallelism.ranks
    label = gpu.name if count == 1 else f"{count} × {gpu.name}"
    return Place(label=label, memory_bytes=count * gpu.memory_bytes, on_gpu=True, gpu=gpu, gpus=count)


def _usable_gpus(spec: Spec) -> list[Gpu]:
    """Return the GPUs of the requested kind, which is NVIDIA's without a request."""
    kind = [gpu for gpu in GPUS if gpu.is_amd == spec.resources.on_amd]
    return [gpu for gpu in kind if gpu.has_fp8 or spec.engine.quantization != "fp8"]


def answers(
    spec: Spec, facts: ModelFacts, where: Sequence[Place], *, machine: Machine, draft: ModelFacts | None = None
) -> list[Answer]:
    found: list[Answer] = []
    for place in where:
        needs, limits = measure(
            spec, facts, on_gpu=place.on_gpu, multiplies_bfloat16=machine.multiplies_bfloat16, draft=draft
        )
        memory = place.memory_bytes
        parts = max(place.nodes, place.gpus)
        memory = capacity.memory_of_parts(spec, facts.config, needs.dtype, memory // parts, parts=parts)
        outcome = capacity.fit(spec, needs, limits, memory_bytes=memory)
        found.append(Answer(place=place, needs=needs, limits=limits, outcome=outcome))
    return found


def render(
    spec: Spec, facts: ModelFacts, found: Sequence[Answer], *, draft: ModelFacts | None = None
) -> RenderableType:
    """Return the tables: what the model needs, where it fits, and what would make it fit."""
    return Group(_needs(spec, facts, draft, found[0]), Text(), _fits(spec, found), *_advice(spec, facts, found))


def _needs(spec: Spec, facts: ModelFacts, draft: ModelFacts | None, answer: Answer) -> Table:
    config, needs, limits = facts.config, answer.needs, answer.limits
    tables = f"in {needs.quantization}, with embeddings in {needs.dtype}"
    held = tables if needs.quantization else f"× {DTYPE_BYTES[needs.dtype]} bytes"
    counted = "counted in the weights" if facts.counted else "computed from the configuration"
    experts = f", {config.experts} experts" if config.experts > 1 else ""
    one = needs.sequence_bytes(limits)
    swap = spec.engine.swap_space_bytes
    windowed = config.layers - config.windows.count(None)
    windows = f", {windowed} with a window" if windowed else ""
    alone = needs.without_draft or needs
    copies = kv_copies(config, spec.parallelism)
    per_token = (
        f"{config.layers} layers × {config.kv_heads * copies} KV heads × {config.head_dim}"
        if len(set(config.kv_widths)) == 1
        else f"{sum(config.kv_widths) * copies:,} numbers in {config.layers} layers"
    )
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    rows = (
        (spec.name, f"{spec.model.source}  ({config.family})"),
        (
            "Shape",
            f"{config.layers} layers{windows}, {config.heads} heads on {config.kv_heads} KV heads of "
            f"{config.head_dim}{experts}",
        ),
        *([("Ranks", _ranks(spec, answer))] if spec.parallelism.ranks > 1 else []),
        (
            "Memory per token",
            f"{format_bytes(alone.kv_bytes_per_token)} = 2 × {per_token} × {needs.kv_width} bytes ({needs.kv_dtype})",
        ),
        (
            "Weights",
            f"{format_bytes(needs.weight_bytes)} = {_count(needs.parameters)} parameters {held}, {counted}",
        ),
        *([("Draft model", _draft(spec, draft, needs))] if draft is not None else []),
        ("Working space", f"about {format_bytes(needs.workspace_bytes)}"),
        *([("Adapters", _adapters(spec, needs))] if needs.adapter_bytes else []),
        *([("Swap space", f"{format_bytes(swap)} of host memory")] if swap else []),
        ("Longest sequence", f"{limits.sequence_tokens:,} tokens, {format_bytes(one)} of KV cache"),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _draft(spec: Spec, draft: ModelFacts, needs: Footprint) -> str:
    assert spec.engine.speculation is not None and spec.engine.speculation.draft is not None
    assert needs.without_draft is not None
    per_token = needs.kv_bytes_per_token - needs.without_draft.kv_bytes_per_token
    return (
        f"{format_bytes(needs.draft_bytes)} of weights, {format_bytes(per_token)} per token in the KV cache: "
        f"{spec.engine.speculation.draft.source}  ({draft.config.family}, {_count(draft.parameters)} parameters)"
    )


def _ranks(spec: Spec, answer: Answer) -> str:
    shape, needs = spec.parallelism, answer.needs
    share = format_bytes(needs.weight_bytes // shape.ranks)
    stages = f" in {shape.pipeline} stages of {shape.tensor}" if shape.pipeline > 1 else ""
    ranks = f"{shape.ranks}{stages}, each with {'about ' if stages else ''}{share} of the weights"
    if answer.place.on_gpu:
        pods = f", in {shape.nodes} pods of {shape.ranks_per_node} GPUs" if shape.is_group else ""
        return f"{ranks}, on a GPU of its own{pods}; together they use the memory below"
    if not shape.is_group:
        return f"{ranks}; together they use the memory below"
    node = format_bytes(needs.weight_bytes // shape.nodes)
    return (
        f"{ranks}; {shape.nodes} pods of {shape.ranks_per_node} with {node} each, which are a group and use the memory "
        "below together"
    )


def _adapters(spec: Spec, needs: Footprint) -> str:
    slots = spec.engine.adapters
    assert slots is not None
    return (
        f"{format_bytes(needs.adapter_bytes)}: {slots.max_loaded} slots of rank {slots.max_rank}, and "
        f"{slots.in_memory} adapters in host memory"
    )


def _fits(spec: Spec, found: Sequence[Answer]) -> Table:
    table = Table(expand=False)
    table.add_column("One replica in", no_wrap=True)
    for name in ("Memory", "KV cache", "Tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"Sequences of {found[0].limits.sequence_tokens:,}", justify="right")
    table.add_column("")
    for answer in found:
        memory = format_bytes(answer.place.memory_bytes)
        match answer.outcome:
            case Fits(kv_cache_bytes=cache, kv_tokens=tokens, sequences=sequences):
                bound = " (maxSequences)" if sequences == spec.engine.max_sequences else ""
                figures = (format_bytes(cache), f"{tokens:,}", f"{sequences:,}{bound}")
                table.add_row(answer.place.label, memory, *figures, Text("fits", style="green"))
            case TooSmall(needed_bytes=needed, kv_cache_bytes=cache):
                left = format_bytes(cache) if cache else "none"
                verdict = Text(f"needs {format_bytes(needed)}", style="red")
                table.add_row(answer.place.label, memory, left, "–", "–", verdict)
    return table


def _advice(spec: Spec, facts: ModelFacts, found: Sequence[Answer]) -> list[Text]:
    small = [answer for answer in found if isinstance(answer.outcome, TooSmall)]
    share = spec.engine.kv_cache
    lines: list[Text] = []
    if share.size_bytes is None:
        lines.append(
            Text(
                f"A replica may use {share.memory_percent} % of the memory (spec.engine.kvCache.memoryPercent).", "dim"
            )
        )
    lines += [Text(f"CPU of this machine: {answer.place.cpu}.", "dim") for answer in found if answer.place.cpu]
    if len(small) == len(found):
        advice = "; ".join(_remedies(spec, facts, small[-1]))
        lines.append(Text(f"It does not fit. Possible remedies: {advice}.", "bold"))
    return lines


def _remedies(spec: Spec, facts: ModelFacts, answer: Answer) -> list[str]:
    place, needs, outcome = answer.place, answer.needs, answer.outcome
    assert isinstance(outcome, TooSmall)
    advice = remedies(spec, needs, answer.limits, outcome, shared=place.divided)
    larger = [gpu.name for gpu in _usable_gpus(spec) if place.gpus * gpu.memory_bytes >= outcome.needed_bytes]
    if place.on_gpu and larger:
        advice.append(f"use {'a GPU' if place.gpus == 1 else 'GPUs'} such as {larger[0]}")
    if place.on_gpu and (count := gpus_that_fit(spec, facts, gpu_bytes=place.memory_bytes // place.gpus)) is not None:
        advice.append(f"set spec.parallelism.tensor and the GPUs in spec.resources to {count}")
    if place.on_gpu and needs.dtype == "float32":
        advice.append("set spec.engine.dtype to BFloat16, which halves weights and KV cache")
    return advice


def _count(parameters: int) -> str:
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}"
    return str(parameters)
