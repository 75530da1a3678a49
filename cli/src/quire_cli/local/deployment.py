"""An LLMDeployment as processes of this machine: the engines' command line, their GPUs, API keys and adapters."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire_cli.errors import SpecProblem
from quire_cli.local.plan import Sized
from quire_cli.local.process import LOOPBACK
from quire_cli.local.state import write_atomically
from quire_common.contract.adapters_file import AdapterEntry, render_adapters
from quire_common.contract.gateway import HoldPolicy
from quire_common.model_source import FileSource, Source
from quire_operator.api import AdapterSpec, Spec
from quire_operator.deployment.engine_contract import engine_args, kill_grace_seconds

KEY_FILE_VARIABLE = "QUIRE_API_KEY_FILE"
_KEY_FILE_HINT = f"write the keys to a file, one per line, and set {KEY_FILE_VARIABLE}=FILE; or remove spec.auth"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDeployment:
    name: str
    served_name: str
    command: Callable[[int], Sequence[str]]
    """The command line of an engine for a port."""
    kill_grace_seconds: float
    adapters: tuple[str, ...] = ()
    """The names of its adapters in requests."""
    gpus: tuple[int, ...] = ()
    """The GPUs of this machine that its replicas use; empty means the CPU."""
    gpus_per_replica: int = 1
    hold: HoldPolicy = HoldPolicy()
    """The bounds of requests that wait for a replica."""

    def gpus_of(self, number: int) -> tuple[int, ...]:
        """Return the GPUs of a replica. The next replica that has a number gets the same ones."""
        first = number % self._num_gpu_sets * self.gpus_per_replica
        return self.gpus[first : first + self.gpus_per_replica]

    def new_numbers(self, count: int, *, staying: Iterable[int], draining: Iterable[int]) -> list[int]:
        """Return the numbers of new replicas: each has the GPUs with the fewest replicas, and the lowest free number.

        A draining replica keeps its number. It leaves its GPUs soon, so one that stays counts more.
        """
        sets = self._num_gpu_sets
        stay, drain = list(staying), list(draining)
        new: list[int] = []
        for _ in range(count):
            taken = {*stay, *drain, *new}
            num_staying = Counter(number % sets for number in (*stay, *new))
            num_draining = Counter(number % sets for number in drain)
            # So many numbers contain a free one of each set of GPUs.
            free = (number for number in range(sets * (len(taken) + 1)) if number not in taken)
            new.append(min(free, key=lambda n: (num_staying[n % sets], num_draining[n % sets], n)))
        return new

    @property
    def _num_gpu_sets(self) -> int:
        return max(1, len(self.gpus) // self.gpus_per_replica)


def local_deployment(
    sized: Sized,
    adapters: Sequence[AdapterSpec],
    *,
    engine: Sequence[str],
    environ: Mapping[str, str],
    base: Path,
    adapters_folder: Path,
) -> LocalDeployment:
    """Return an LLMDeployment as processes, and write the list of its adapters.

    engine    the engine's command
    adapters  all of the manifest
    base      the manifest's folder, where relative sources start
    """
    spec = sized.spec
    own = [adapter for adapter in adapters if adapter.deployment == spec.name]
    adapters_file = None
    if spec.engine.adapters is not None:
        adapters_folder.mkdir(exist_ok=True)
        adapters_file = adapters_folder / f"{spec.name}.json"
        write_adapters(adapters_file, own, base=base)

    def command(port: int) -> list[str]:
        args = engine_args(
            spec,
            model_path=str(sized.folder),
            draft_path=None if sized.draft_folder is None else str(sized.draft_folder),
            host=LOOPBACK,
            port=port,
            kv_cache_bytes=sized.kv_cache_bytes,
            threads=sized.share.threads,
            api_key_file=key_file(spec, environ),
            adapters_file=None if adapters_file is None else str(adapters_file),
        )
        return [*engine, *args]

    return LocalDeployment(
        name=spec.name,
        served_name=spec.model.served_name,
        command=command,
        kill_grace_seconds=kill_grace_seconds(spec),
        adapters=tuple(adapter.served_name for adapter in own),
        gpus=sized.share.gpus,
        gpus_per_replica=max(1, spec.gpus_per_replica),
        hold=_hold_policy(spec),
    )


def write_adapters(file: Path, adapters: Iterable[AdapterSpec], *, base: Path) -> None:
    """Write the list of adapters that engines read; relative sources start at ``base``."""
    entries = [
        AdapterEntry(name=each.served_name, source=_local_source(each.source, base), placement=each.placement)
        for each in adapters
    ]
    write_atomically(file, render_adapters(entries))


def _local_source(source: Source, base: Path) -> str:
    if isinstance(source, FileSource) and source.relative:
        return str((base / source.path).resolve())
    return str(source)


def _hold_policy(spec: Spec) -> HoldPolicy:
    """Return the bounds of requests that wait for a replica; what the spec leaves open is the gateway's decision."""
    if spec.autoscaling is None:
        return HoldPolicy()
    rules = spec.autoscaling.scale_to_zero
    return HoldPolicy(timeout_seconds=rules.hold_timeout_seconds, max_held=rules.max_held)


def key_file(spec: Spec, environ: Mapping[str, str]) -> str | None:
    """Return the file with the keys that ``spec.auth`` requires, because there are no Secrets; None without keys."""
    return None if spec.auth_secret is None else str(Path(environ[KEY_FILE_VARIABLE]).resolve())


def check_key_file(specs: Sequence[Spec], environ: Mapping[str, str]) -> None:
    """Raise ``SpecProblem`` if keys are required and there is no key file."""
    asking = [spec for spec in specs if spec.auth_secret is not None]
    if not asking:
        return
    who = f"{asking[0].name}: spec.auth names the Secret {asking[0].auth_secret}"
    name = environ.get(KEY_FILE_VARIABLE)
    if not name:
        raise SpecProblem(f"{who}, and there are no Secrets outside a cluster", hint=_KEY_FILE_HINT)
    try:
        Path(name).read_bytes()
    except OSError as error:
        problem = f"{who}; {KEY_FILE_VARIABLE}={name} cannot be read: {error.strerror}"
        raise SpecProblem(problem, hint=_KEY_FILE_HINT) from error
