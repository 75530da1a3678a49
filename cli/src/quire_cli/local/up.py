"""``quire up``: serve the LLMDeployments of a YAML file on this machine until it is stopped.

Read → claim the folder and the port → fetch and size the models → start → watch, scale, show → drain. User errors raise
a UserError before anything is started; everything that was started is ended on every exit.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp

from quire_cli.errors import ModelProblem, StartProblem
from quire_cli.local.adapters import write_adapters
from quire_cli.local.documents import Manifests, read_manifests
from quire_cli.local.host import Commands, check_port, logging_to, race
from quire_cli.local.keys import check_key_file, key_file
from quire_cli.local.machine import Machine, this_machine, with_tried_cpu
from quire_cli.local.model_store import ModelStore, folder_facts
from quire_cli.local.process import own_identity
from quire_cli.local.replicas import LocalCluster, LocalDeployment
from quire_cli.local.scaling import LocalScaling
from quire_cli.local.sizing import Sized, share_of, size
from quire_cli.local.snapshot import DeploymentView, Snapshot, TokenRates, as_state, replica_views
from quire_cli.local.state import RunFolder, run_folder, state_home
from quire_cli.local.supervision import LOOPBACK, Launch, Pace, Phase, Status, how_it_ended, phase_message
from quire_cli.local.views import View
from quire_common.contract.engine import CONFIG_ERROR_EXIT_CODE
from quire_common.contract.gateway import LIVE_PATH, HoldPolicy
from quire_common.model_source import cache_home
from quire_operator.adapters.metrics.gateways import Gateways
from quire_operator.adapters.metrics.prometheus import Prometheus
from quire_operator.adapters.metrics.scrape import Scraper
from quire_operator.adapters.metrics.sources import MetricsSources
from quire_operator.adapters.wall_clock import WallClock
from quire_operator.domain.autoscaling.gateway_contract import local_gateway_args
from quire_operator.domain.autoscaling.observation import ReplicaSample
from quire_operator.domain.autoscaling.prometheus_series import PrometheusOptions
from quire_operator.domain.autoscaling.ticks import Tick
from quire_operator.domain.manifests.engine_contract import engine_args, kill_grace_seconds
from quire_operator.domain.resource import AdapterSpec, Spec
from quire_operator.scaling.autoscale import TICK_SECONDS

_ATTEMPTS_TO_START = 2
"""A port can be taken between choosing and listening; a retry fixes nothing else."""
_SHOW_SECONDS = 1.0
_LOG_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The options of a run."""

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
            check_port(options.port)
            stack.enter_context(logging_to(folder.logs / "quire.log"))
            preparing = asyncio.create_task(self._fetch_and_size(specs))
            await race(asyncio.wait((preparing,)), self._asked_to_stop.wait())
            if not preparing.done():
                preparing.cancel()
                await asyncio.wait((preparing,))
                self._view.event("end", "stopped before anything was started; downloaded files are kept")
                return
            sized = preparing.result()
            http = await stack.enter_async_context(aiohttp.ClientSession(trust_env=False))
            scraper, gateways = Scraper(clock=WallClock()), Gateways(self._gateway_address)
            metrics = MetricsSources(pods=scraper, prometheus=self._prometheus(), gateways=gateways)
            stack.push_async_callback(metrics.aclose)
            run = _Run(options, manifests, folder=folder, http=http, scraper=scraper, metrics=metrics, view=self._view)
            stack.push_async_callback(run.end_at_once)
            await run.serve(sized, stop=self._asked_to_stop, kill=self._asked_to_kill)

    async def _gateway_address(self) -> Sequence[str]:
        return (self._address,)

    def _prometheus(self) -> Prometheus | None:
        url = self._options.prometheus_url
        return None if url is None else Prometheus(PrometheusOptions(url=url), clock=WallClock())

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
        self,
        options: UpOptions,
        manifests: Manifests,
        *,
        folder: RunFolder,
        http: aiohttp.ClientSession,
        scraper: Scraper,
        metrics: MetricsSources,
        view: View,
    ) -> None:
        specs, self._adapters = manifests.deployments, manifests.adapters
        self._options, self._specs, self._folder, self._scraper, self._view = options, specs, folder, scraper, view
        self._address = f"http://{LOOPBACK}:{options.port}"
        self._started, self._owner = time.time(), own_identity()
        self._draining = False
        self._changed = asyncio.Event()
        self._shown_phases: dict[str, Phase] = {}
        self._cluster = LocalCluster(
            http=http,
            endpoints_file=folder.endpoints,
            targets_file=folder.targets,
            logs=folder.logs,
            pace=options.pace,
            changed=self._on_change,
            troubled=lambda message: view.event("trouble", message),
        )
        self._scaling = LocalScaling(
            specs,
            self._cluster,
            metrics=metrics,
            tick_seconds=options.tick_seconds,
            decided=self._on_decision,
        )

    async def serve(self, sized: Sequence[Sized], *, stop: asyncio.Event, kill: asyncio.Event) -> None:
        """Start everything, serve, and drain."""
        self._cluster.start_gateway(self._gateway_launch())
        for one in sized:
            replicas = self._scaling.initial_replicas(one.spec, time.time())
            self._cluster.add(self._deployment(one), replicas=replicas)
        names = ", ".join(spec.name for spec in self._specs)
        self._view.event("start", f"starting {names}; logs in {self._folder.logs}", {"logs": str(self._folder.logs)})
        for name in (spec.name for spec in self._specs if spec.rollout.canary_policy is not None):
            text = (
                f"{name}: spec.rollout.strategy Canary has no effect here: the file is read once, so that there is "
                "nothing to compare it with; in a cluster, a changed spec starts a canary"
            )
            self._view.event("note", text, {"name": name})
        await race(
            self._serve_and_drain(stop, kill),
            self._show_forever(),
            self._report_loading_forever(),
            self._cluster.until_broken(),
        )

    async def end_at_once(self) -> None:
        """Kill the processes that still run, which after a drain is no process."""
        await self._cluster.kill()
        self._write_state(ended=time.time())
        self._view.event("end", "all processes have ended")

    async def _serve_and_drain(self, stop: asyncio.Event, kill: asyncio.Event) -> None:
        await race(self._until_over(), self._scaling.run(), stop.wait())
        self._draining = True
        self._view.event("drain", "draining: running requests finish; press Ctrl-C again to end at once")
        await race(self._cluster.stop(), kill.wait())

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
        rates = TokenRates()
        while True:
            if self._view.wants_snapshots:
                addresses = [address for spec in self._specs for address in self._cluster.addresses(spec.name)]
                samples = await self._scraper.samples(addresses)
                self._view.show(self._snapshot(samples, rates.update(samples)))
            await asyncio.sleep(_SHOW_SECONDS)

    def _snapshot(self, samples: Mapping[str, ReplicaSample], rates: Mapping[str, float]) -> Snapshot:
        now = time.time()
        return Snapshot(
            time=now,
            started=self._started,
            address=self._address,
            file=str(self._options.file.resolve()),
            gateway=self._cluster.gateway,
            deployments=tuple(
                DeploymentView(
                    spec=spec,
                    target=self._cluster.target(spec.name),
                    replicas=replica_views(self._cluster.statuses(spec.name), samples, rates),
                    decisions=self._scaling.decisions.get(spec.name, ()),
                    bounds=self._scaling.bounds(spec, now),
                )
                for spec in self._specs
                if spec.name in self._cluster
            ),
            draining=self._draining,
        )

    def _write_state(self, *, ended: float | None = None) -> None:
        self._folder.write(as_state(self._snapshot({}, {}), owner=self._owner, ended=ended))

    def _on_change(self, status: Status) -> None:
        self._write_state()
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
        self._write_state()
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

    def _deployment(self, sized: Sized) -> LocalDeployment:
        adapters = [adapter for adapter in self._adapters if adapter.deployment == sized.spec.name]
        adapters_file = self._adapters_file(sized.spec, adapters)

        def command(port: int) -> list[str]:
            args = engine_args(
                sized.spec,
                model_path=str(sized.folder),
                draft_path=None if sized.draft_folder is None else str(sized.draft_folder),
                host=LOOPBACK,
                port=port,
                kv_cache_bytes=sized.kv_cache_bytes,
                threads=sized.share.threads,
                api_key_file=key_file(sized.spec, self._options.environ),
                adapters_file=None if adapters_file is None else str(adapters_file),
            )
            return [*self._options.commands.engine, *args]

        return LocalDeployment(
            name=sized.spec.name,
            served_name=sized.spec.model.served_name,
            command=command,
            kill_grace_seconds=kill_grace_seconds(sized.spec),
            adapters=tuple(adapter.served_name for adapter in adapters),
            gpus=sized.share.gpus,
            gpus_per_replica=max(1, sized.spec.gpus_per_replica),
            hold=hold_policy(sized.spec),
        )

    def _adapters_file(self, spec: Spec, adapters: Sequence[AdapterSpec]) -> Path | None:
        """Write the list of adapters of an LLMDeployment; None if it has no room for any."""
        if spec.engine.adapters is None:
            return None
        self._folder.adapters.mkdir(exist_ok=True)
        file = self._folder.adapters / f"{spec.name}.json"
        write_adapters(file, adapters, base=self._options.file.resolve().parent)
        return file


def hold_policy(spec: Spec) -> HoldPolicy:
    """Return the bounds of requests that wait for a replica; what the spec leaves open is the gateway's decision."""
    if spec.autoscaling is None:
        return HoldPolicy()
    rules = spec.autoscaling.scale_to_zero
    return HoldPolicy(timeout_seconds=rules.hold_timeout_seconds, max_held=rules.max_held)
