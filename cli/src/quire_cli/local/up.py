"""``quire up``: serve the LLMDeployments of a YAML file on this machine until it is stopped.

Read → claim the folder and the port → fetch and size the models → start → watch, scale, show → drain. User errors raise
a UserError before anything is started; everything that was started is ended on every exit.
"""

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from quire_cli.errors import AddressProblem, ModelProblem, StartProblem
from quire_cli.local.deployment import check_key_file, local_deployment
from quire_cli.local.documents import Manifests, read_manifests
from quire_cli.local.machine import Commands, Machine, installed_commands, this_machine, with_tried_cpu
from quire_cli.local.model_store import ModelStore, folder_facts
from quire_cli.local.plan import Sized, share_of, size
from quire_cli.local.process import LOOPBACK, Launch, Pace, Phase, Status, free_port, how_it_ended, phase_message
from quire_cli.local.replicas import LocalCluster
from quire_cli.local.scaling import LocalScaling
from quire_cli.local.state import ReplicaState, RunFolder, RunState, ServedState, run_folder, state_home
from quire_cli.local.views import JsonLines, LiveTable, ReplicaMetrics, View
from quire_cli.options import DURATION, URL, FileOption, discard_output
from quire_common.contract.engine import CONFIG_ERROR_EXIT_CODE
from quire_common.contract.gateway import LIVE_PATH
from quire_common.model_source import cache_home
from quire_operator.api import Spec
from quire_operator.autoscaling.autoscale import TICK_SECONDS
from quire_operator.autoscaling.observation import local_gateway_args
from quire_operator.autoscaling.scrape import Gateways, MetricsSources, Scraper
from quire_operator.autoscaling.ticks import Tick

if TYPE_CHECKING:
    from quire_operator.autoscaling.prometheus import Prometheus

_ATTEMPTS_TO_START = 2
"""A port can be taken between choosing and listening; a retry fixes nothing else."""
_SHOW_SECONDS = 1.0
_LOG_LINES = 12


def up(
    file: FileOption,
    port: Annotated[int, typer.Option(help="The port to listen on, at 127.0.0.1.", min=1, max=65535)] = 8000,
    exit_after: Annotated[
        float | None,
        typer.Option(help="Drain and exit this long after the address is ready.", show_default=False, **DURATION),
    ] = None,
    prometheus_url: Annotated[
        str | None,
        typer.Option(
            help="Scale by the metrics of this Prometheus, which finds the replicas in the run's folder"
            " (prometheus-targets.json, for file_sd_configs). Without it the replicas are scraped directly.",
            show_default=False,
            **URL,
        ),
    ] = None,
) -> None:
    """Serve the LLMDeployments of a file on this machine. Ctrl-C drains, a second Ctrl-C exits at once.

    Starts an engine process per replica and a gateway in front of them, and scales by spec.autoscaling. On a terminal
    it shows a live table, elsewhere one JSON object per line. The file is read once: to apply a change, restart
    quire up.

      quire up -f examples/demo.yaml

      quire up -f examples/demo.yaml --port 9000 --exit-after 10m

      curl http://127.0.0.1:8000/v1/models
    """
    options = UpOptions(
        file=file,
        port=port,
        exit_after_seconds=exit_after,
        prometheus_url=prometheus_url,
        environ=os.environ,
        commands=installed_commands(),
    )
    console = Console()
    view: View = LiveTable(console) if console.is_terminal else JsonLines(sys.stdout, on_gone=_end_unread)
    try:
        asyncio.run(_up(options, view))
    finally:
        view.close()


async def _up(options: "UpOptions", view: View) -> None:
    run = Up(options, view)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, run.stop)
    await run.run()


def _end_unread() -> None:
    """End this process in the way a user would."""
    discard_output()
    os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    file: Path
    port: int
    exit_after_seconds: float | None
    """The time to serve after the address is ready; None serves until it is stopped."""
    environ: Mapping[str, str]
    commands: Commands
    machine: Machine | None = None
    """None: this machine."""
    tick_seconds: float = TICK_SECONDS
    prometheus_url: str | None = None
    """The source of the autoscaler's metrics; None: the replicas."""
    pace: Pace = field(default_factory=Pace)


class Up:
    """A run. ``stop`` drains it; a second ``stop`` ends it at once."""

    def __init__(self, options: UpOptions, view: View) -> None:
        self._options, self._view = options, view
        self._address = f"http://{LOOPBACK}:{options.port}"
        self._asked_to_stop, self._asked_to_kill = asyncio.Event(), asyncio.Event()

    def stop(self) -> None:
        """Drain, or end at once if it already drains."""
        if self._asked_to_stop.is_set():
            self._view.event("kill", "ending at once")
            self._asked_to_kill.set()
        self._asked_to_stop.set()

    async def run(self) -> None:
        """Serve until stopped, or raise UserError."""
        options = self._options
        manifests = read_manifests(options.file)
        specs = manifests.deployments
        check_key_file(specs, options.environ)
        async with AsyncExitStack() as stack:
            folder = RunFolder.claim(run_folder(state_home(options.environ), options.file), file=options.file)
            stack.callback(folder.release)
            _check_port(options.port)
            stack.enter_context(logging_to(folder.logs / "quire.log"))
            preparing = asyncio.create_task(self._fetch_and_size(specs))
            await _race(asyncio.wait((preparing,)), self._asked_to_stop.wait())
            if not preparing.done():
                preparing.cancel()
                await asyncio.wait((preparing,))
                self._view.event("end", "stopped before anything was started; downloaded files are kept")
                return
            sized = preparing.result()
            metrics = MetricsSources(
                pods=Scraper(clock=time.time),
                prometheus=None if options.prometheus_url is None else _prometheus(options.prometheus_url),
                gateways=Gateways(self._gateway_address),
            )
            stack.push_async_callback(metrics.aclose)
            run = _Run(options, manifests, folder=folder, metrics=metrics, view=self._view)
            stack.push_async_callback(run.end_at_once)
            await run.serve(sized, stop=self._asked_to_stop, kill=self._asked_to_kill)

    async def _gateway_address(self) -> Sequence[str]:
        return (self._address,)

    async def _fetch_and_size(self, specs: Sequence[Spec]) -> list[Sized]:
        """Fetch every model and check that it fits; raise ModelProblem or CapacityProblem."""
        machine = self._options.machine
        if machine is None:
            machine = await with_tried_cpu(this_machine(), self._options.commands.engine)
        store = ModelStore(base=self._options.file.resolve().parent, cache=cache_home(self._options.environ))
        found: list[Sized] = []
        for spec in specs:
            share = share_of(spec, specs, machine)
            progress = partial(self._view.download, str(spec.model.source))
            say = partial(self._view.event, "download")
            folder = await store.fetch(spec.model.source, progress=progress, say=say)
            facts = folder_facts(folder, weights_needed=not spec.engine.invents_weights)
            of_draft = partial(self._view.download, f"draft model of {spec.name}")
            draft = await store.fetch_draft(spec, progress=of_draft, say=say)
            sized = size(spec, facts, folder=folder, share=share, machine=machine, draft=draft)
            if draft is not None and sized.draft_folder is None:
                say(f"{spec.name} serves without its draft model, which does not fit into its memory")
            found.append(sized)
        return found


class _Run:
    """The processes of a run and the tasks that watch them."""

    def __init__(
        self, options: UpOptions, manifests: Manifests, *, folder: RunFolder, metrics: MetricsSources, view: View
    ) -> None:
        self._options, self._manifests, self._folder, self._view = options, manifests, folder, view
        self._specs, self._metrics = manifests.deployments, metrics
        self._address = f"http://{LOOPBACK}:{options.port}"
        self._started = time.time()
        self._draining = False
        self._changed = asyncio.Event()
        self._shown_phases: dict[str, Phase] = {}
        self._cluster = LocalCluster(
            endpoints_file=folder.endpoints,
            targets_file=folder.targets,
            logs=folder.logs,
            pace=options.pace,
            changed=self._on_change,
            troubled=lambda message: view.event("trouble", message),
        )
        self._scaling = LocalScaling(
            self._specs, self._cluster, metrics=metrics, tick_seconds=options.tick_seconds, decided=self._on_decision
        )

    async def serve(self, sized: Sequence[Sized], *, stop: asyncio.Event, kill: asyncio.Event) -> None:
        """Start everything, serve, and drain."""
        self._cluster.start_gateway(self._gateway_launch())
        for one in sized:
            replicas = self._scaling.initial_replicas(one.spec, time.time())
            deployment = local_deployment(
                one,
                self._manifests.adapters,
                engine=self._options.commands.engine,
                environ=self._options.environ,
                base=self._options.file.resolve().parent,
                adapters_folder=self._folder.adapters,
            )
            self._cluster.add(deployment, replicas=replicas)
        names = ", ".join(spec.name for spec in self._specs)
        self._view.event("start", f"starting {names}; logs in {self._folder.logs}", {"logs": str(self._folder.logs)})
        for name in (spec.name for spec in self._specs if spec.rollout.canary_policy is not None):
            text = (
                f"{name}: spec.rollout.strategy Canary has no effect here: the file is read once, so that there is "
                "nothing to compare it with; in a cluster, a changed spec starts a canary"
            )
            self._view.event("note", text, {"name": name})
        await _race(
            self._serve_and_drain(stop, kill),
            self._show_forever(),
            self._report_loading_forever(),
            self._cluster.until_broken(),
        )

    async def end_at_once(self) -> None:
        """Kill the processes that still run, which after a drain is no process."""
        await self._cluster.kill()
        self._folder.write(self._state(ended=time.time()))
        self._view.event("end", "all processes have ended")

    async def _serve_and_drain(self, stop: asyncio.Event, kill: asyncio.Event) -> None:
        await _race(self._until_over(), self._scaling.run(), stop.wait())
        self._draining = True
        self._view.event("drain", "draining: running requests finish; press Ctrl-C again to end at once")
        await _race(self._cluster.stop(), kill.wait())

    async def _until_over(self) -> None:
        while not self._is_ready():
            self._check_start()
            self._changed.clear()
            await self._changed.wait()
        self._announce()
        if self._options.exit_after_seconds is None:
            await asyncio.Event().wait()
        else:
            await asyncio.sleep(self._options.exit_after_seconds)

    def _is_ready(self) -> bool:
        """Return whether the gateway is ready, and a replica of each deployment that has any."""
        gateway = self._cluster.gateway
        return (gateway is not None and gateway.phase is Phase.READY) and all(
            any(status.phase is Phase.READY for status in self._cluster.statuses(spec.name))
            for spec in self._specs
            if self._cluster.target(spec.name) > 0
        )

    def _check_start(self) -> None:
        """Raise ModelProblem if an engine rejects its model, StartProblem if a process ended twice unready."""
        groups = [self._cluster.statuses(spec.name) for spec in self._specs]
        if self._cluster.gateway is not None:
            groups.append((self._cluster.gateway,))
        for group in groups:
            for status in group:
                if any(other.ever_ready for other in group) or not status.restarts:
                    continue
                details, hint = status.last_lines(_LOG_LINES), f"the whole log is {status.log}"
                if status.exit_code == CONFIG_ERROR_EXIT_CODE:
                    raise ModelProblem(f"{status.name} cannot start", details=details, hint=hint)
                if status.restarts >= _ATTEMPTS_TO_START:
                    how = status.reason if status.exit_code is None else how_it_ended(status.exit_code)
                    ended = f"{status.name} ended before it was ready ({how})"
                    raise StartProblem(ended, details=details, hint=hint)

    def _announce(self) -> None:
        model = self._specs[0].model.served_name
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is a list?"}]})
        curl = f"curl {self._address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
        took = time.time() - self._started
        base_url = f"{self._address}/v1"
        self._view.event(
            "ready",
            f"ready after {took:.1f} s: OpenAI-compatible API at {base_url}",
            {"address": self._address, "baseUrl": base_url, "curl": curl, "seconds": round(took, 3)},
        )

    async def _report_loading_forever(self) -> None:
        """Report the processes that were loading at the last report, too, with what they wrote last."""
        before: set[str] = set()
        while True:
            await asyncio.sleep(self._options.pace.report_loading_seconds)
            statuses = [status for spec in self._specs for status in self._cluster.statuses(spec.name)]
            loading = {status.name: status for status in statuses if status.phase is Phase.LOADING}
            for name, status in loading.items():
                if name in before:
                    lines = status.last_lines(1)
                    ends = f"; its log ends with: {lines[0]}" if lines else ""
                    self._view.event("loading", f"{name} is still loading{ends}", {"process": name})
            before = set(loading)

    async def _show_forever(self) -> None:
        metrics = ReplicaMetrics()
        while self._view.wants_metrics:
            replicas = [address for spec in self._specs for address in self._cluster.addresses(spec.name)]
            metrics.update(await self._metrics.samples(replicas))
            self._view.show(self._state(), metrics)
            await asyncio.sleep(_SHOW_SECONDS)
        await asyncio.Event().wait()

    def _state(self, *, ended: float | None = None) -> RunState:
        now, gateway = time.time(), self._cluster.gateway
        served = {spec.name: self._served(spec, now) for spec in self._specs if spec.name in self._cluster}
        statuses = [status for name in served for status in self._cluster.statuses(name)]
        return RunState(
            pid=os.getpid(),
            started=self._started,
            time=now,
            ended=ended,
            file=str(self._options.file.resolve()),
            address=self._address,
            phase=Phase.DRAINING if self._draining else "Down" if gateway is None else gateway.phase,
            deployments=served,
            processes={one.name: one.pid for one in (gateway, *statuses) if one is not None and one.pid is not None},
        )

    def _served(self, spec: Spec, now: float) -> ServedState:
        statuses = self._cluster.statuses(spec.name)
        return ServedState(
            served_name=spec.model.served_name,
            replicas=self._cluster.target(spec.name),
            ready_replicas=sum(status.phase is Phase.READY for status in statuses),
            autoscaling=self._scaling.rules(spec, now),
            replica_states=tuple(
                ReplicaState(name=one.name, phase=one.phase, url=one.url, restarts=one.restarts, reason=one.reason)
                for one in statuses
            ),
            decisions=self._scaling.decisions.get(spec.name, ()),
        )

    def _on_change(self, status: Status) -> None:
        self._folder.write(self._state())
        self._changed.set()
        before = self._shown_phases.get(status.name)
        if before is status.phase:
            return
        self._shown_phases[status.name] = status.phase
        fields: dict[str, object] = {"process": status.name, "phase": status.phase.value, "url": status.url}
        if status.phase is Phase.FAILED:
            fields |= {"exitCode": status.exit_code, "reason": status.reason, "restarts": status.restarts}
        self._view.event("phase", phase_message(status, before), fields)

    def _on_decision(self, spec: Spec, decision: Tick) -> None:
        self._folder.write(self._state())
        fields: dict[str, object] = {
            "deployment": spec.name,
            "changed": decision.is_change,
            "from": decision.from_replicas,
            "to": decision.to_replicas,
            "reason": decision.reason,
            "enforced": decision.enforced,
            "inputs": dict(decision.inputs),
        }
        self._view.event("decision", f"{spec.name}: {decision.message}", fields)

    def _gateway_launch(self) -> Launch:
        longest = max(spec.drain.timeout_seconds for spec in self._specs)
        args = local_gateway_args(
            host=LOOPBACK,
            port=self._options.port,
            endpoints_file=str(self._folder.endpoints),
            drain_timeout_seconds=longest,
        )
        return Launch(
            name="gateway",
            command=lambda port: [*self._options.commands.gateway, *args],
            ready_path=LIVE_PATH,
            log=self._folder.logs / "gateway.log",
            kill_grace_seconds=longest + 5.0,
            port=self._options.port,
        )


def _prometheus(url: str) -> "Prometheus":
    from quire_operator.autoscaling.engine_metrics import PrometheusOptions
    from quire_operator.autoscaling.prometheus import Prometheus  # slow

    return Prometheus(PrometheusOptions(url=url), clock=time.time)


def _check_port(port: int) -> None:
    """Raise AddressProblem if the port cannot be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            reasons = {errno.EADDRINUSE: "is in use", errno.EACCES: "requires more permissions than you have"}
            reason = reasons.get(error.errno or 0, f"cannot be listened on: {error.strerror}")
            raise AddressProblem(f"port {port} {reason}", hint=f"use another port: --port {free_port()}") from None


class _Log(logging.FileHandler):
    """A log file that drops lines on a full disk, without a message on the terminal."""

    def handleError(self, record: logging.LogRecord) -> None: ...

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(file: Path) -> Iterator[None]:
    """Log this process to a file, because the terminal shows the table."""
    handler = _Log(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("quire_cli", "quire_operator", "quire_common")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.level = logging.INFO
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.level = level
        handler.close()


async def _race(*runners: Awaitable[object]) -> None:
    """Wait until one finishes, cancel the others, and raise an error of any."""
    tasks = [asyncio.ensure_future(runner) for runner in runners]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
