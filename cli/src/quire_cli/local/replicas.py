"""A cluster of local processes: each replica is an engine on a free loopback port, with one gateway in front.

It scales the replicas of local mode. Gateway and Prometheus read the replicas from files,
which are written as a whole at each change.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from quire_cli.local.deployment import LocalDeployment
from quire_cli.local.process import KeptProcess, Launch, Pace, Phase, Status
from quire_cli.local.state import write_atomically
from quire_common.contract.engine import METRICS_PATH, READY_PATH
from quire_common.contract.gateway import Endpoint, render_endpoints
from quire_operator.autoscaling.observation import ReplicaAddress, ReplicaPhase

_PHASES: Mapping[Phase, ReplicaPhase] = {
    Phase.PENDING: ReplicaPhase.PENDING,
    Phase.FAILED: ReplicaPhase.PENDING,
    Phase.LOADING: ReplicaPhase.LOADING,
    Phase.READY: ReplicaPhase.READY,
    Phase.DRAINING: ReplicaPhase.DRAINING,
    Phase.ENDED: ReplicaPhase.DRAINING,
}
_WRITE_AGAIN_SECONDS = 1.0


class LocalCluster:
    """The processes. ``changed`` is called after each change of a phase."""

    def __init__(
        self,
        *,
        endpoints_file: Path,
        targets_file: Path | None = None,
        logs: Path,
        pace: Pace | None = None,
        changed: Callable[[Status], None] = lambda status: None,
        troubled: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._endpoints_file, self._logs = endpoints_file, logs
        self._troubled = troubled
        self._write_again: asyncio.TimerHandle | None = None
        self._targets_file = targets_file
        self._pace, self._told = pace or Pace(), changed
        self._deployments: dict[str, LocalDeployment] = {}
        self._replicas: dict[str, dict[int, KeptProcess]] = {}
        self._gateway: KeptProcess | None = None
        self._tasks: dict[KeptProcess, asyncio.Task[None]] = {}
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.write_endpoints()

    def __contains__(self, name: str) -> bool:
        return name in self._replicas

    @property
    def gateway(self) -> Status | None:
        return None if self._gateway is None else self._gateway.status

    def statuses(self, name: str) -> tuple[Status, ...]:
        """Return the replicas of a deployment, ordered by number."""
        return tuple(kept.status for _, kept in sorted(self._replicas[name].items()))

    def addresses(self, name: str) -> tuple[ReplicaAddress, ...]:
        """Return the replicas of a deployment as the autoscaler needs them."""
        return tuple(
            ReplicaAddress(
                name=status.name,
                phase=_PHASES[status.phase],
                metrics_url=None if status.url is None else status.url + METRICS_PATH,
            )
            for status in self.statuses(name)
        )

    def target(self, name: str) -> int:
        """Return the number of requested replicas, without those that are ending."""
        return len(self._staying(name))

    def start_gateway(self, launch: Launch) -> None:
        self._gateway = self._keep(launch)

    def add(self, deployment: LocalDeployment, *, replicas: int) -> None:
        """Start a deployment; even without replicas the gateway knows its name."""
        self._deployments[deployment.name] = deployment
        self._replicas[deployment.name] = {}
        self._publish()
        self.scale(deployment.name, replicas=replicas)

    def scale(self, name: str, *, replicas: int, victims: Sequence[str] = ()) -> None:
        """Start missing replicas, or drain surplus ones: the victims first, then the unready, then the youngest."""
        staying, deployment = self._staying(name), self._deployments[name]
        draining = self._replicas[name].keys() - staying.keys()
        for number in deployment.new_numbers(replicas - len(staying), staying=staying, draining=draining):
            self._replicas[name][number] = self._keep(self._launch(deployment, number))

        def worth(number: int) -> tuple[bool, bool, int]:
            kept = staying[number]
            return kept.launch.name not in victims, kept.status.phase is Phase.READY, -number

        for number in sorted(staying, key=worth)[: max(0, len(staying) - replicas)]:
            staying[number].stop()
            self._note(staying[number])

    async def until_broken(self) -> None:
        """Wait forever; raise an error of the supervision itself, which is a bug."""
        await asyncio.shield(self._broken)

    async def stop(self) -> None:
        """Drain all processes together: the gateway rejects new requests and forwards streams until the engines end."""
        for kept in list(self._tasks):
            kept.stop()
        await self._ended(list(self._tasks))

    async def kill(self) -> None:
        for kept in list(self._tasks):
            kept.kill()
        await self._ended(list(self._tasks))
        if self._write_again is not None:
            self._write_again.cancel()

    def write_endpoints(self) -> None:
        """Write the endpoints file atomically: the gateway never reads half a list."""
        endpoints = {
            deployment.served_name: [e for status in self.statuses(name) if (e := _endpoint(status)) is not None]
            for name, deployment in self._deployments.items()
        }
        adapters = {deployment.served_name: deployment.adapters for deployment in self._deployments.values()}
        holds = {deployment.served_name: deployment.hold for deployment in self._deployments.values()}
        write_atomically(self._endpoints_file, render_endpoints(endpoints, adapters, holds))
        if self._targets_file is not None:
            targets = [
                t for name in self._deployments for s in self.statuses(name) if (t := _target(name, s)) is not None
            ]
            write_atomically(self._targets_file, json.dumps(targets, indent=1))

    def _launch(self, deployment: LocalDeployment, number: int) -> Launch:
        name = f"{deployment.name}-{number}"
        return Launch(
            name=name,
            command=deployment.command,
            ready_path=READY_PATH,
            log=self._logs / f"{name}.log",
            kill_grace_seconds=deployment.kill_grace_seconds,
            environment={"CUDA_VISIBLE_DEVICES": ",".join(map(str, deployment.gpus_of(number)))},
        )

    def _staying(self, name: str) -> dict[int, KeptProcess]:
        return {number: kept for number, kept in self._replicas[name].items() if not kept.status.stopping}

    def _keep(self, launch: Launch) -> KeptProcess:
        kept = KeptProcess(launch, pace=self._pace, changed=self._note)
        task = asyncio.create_task(kept.run(), name=launch.name)
        self._tasks[kept] = task
        task.add_done_callback(lambda _: self._forget(kept, task))
        return kept

    def _forget(self, kept: KeptProcess, task: asyncio.Task[None]) -> None:
        self._tasks.pop(kept, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._broken.done():
            self._broken.set_exception(error)
        for group in self._replicas.values():
            for number in [number for number, other in group.items() if other is kept]:
                del group[number]
        self._note(kept)

    def _note(self, kept: KeptProcess) -> None:
        self._publish()
        self._told(kept.status)

    def _publish(self, *, again: bool = False) -> None:
        """Write a file, and retry until it works: on a full disk the replicas continue to serve."""
        if self._write_again is not None and not again:
            return
        try:
            self.write_endpoints()
        except OSError as error:
            later = partial(self._publish, again=True)
            self._write_again = asyncio.get_running_loop().call_later(_WRITE_AGAIN_SECONDS, later)
            if not again:
                self._troubled(
                    f"{self._endpoints_file} cannot be written: {error.strerror}; "
                    "until it can, the gateway does not see new or removed replicas"
                )
        else:
            self._write_again = None
            if again:
                self._troubled(f"{self._endpoints_file} can be written again")

    async def _ended(self, processes: Sequence[KeptProcess]) -> None:
        tasks = [self._tasks[kept] for kept in processes if kept in self._tasks]
        await asyncio.gather(*tasks, return_exceptions=True)


def _endpoint(status: Status) -> Endpoint | None:
    """Return the replica's endpoint; None while it has no address."""
    if status.url is None:
        return None
    draining = status.stopping
    return Endpoint(
        id=status.name,
        url=status.url,
        ready=status.phase is Phase.READY and not draining,
        serving=status.phase in (Phase.READY, Phase.DRAINING),
        terminating=draining,
        starting=status.starts and not draining,
    )


def _target(deployment: str, status: Status) -> dict[str, object] | None:
    """Return the replica as a target of Prometheus's file-based discovery; None while it has no address."""
    if status.url is None:
        return None
    labels = {"llmdeployment": deployment, "replica": status.name}
    return {"targets": [status.url.partition("://")[2]], "labels": labels}
