"""``quire up`` with the real gateway and fake engines: what it starts, prints and survives."""

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from quire_local.harness import FAKE_ENGINE, HURRY, until_dead

from quire_cli.errors import AddressProblem, AlreadyRunning, CapacityProblem, ModelProblem, SpecProblem, StartProblem
from quire_cli.local.machine import Commands, Machine, installed_commands
from quire_cli.local.process import free_port
from quire_cli.local.state import RunState, read, run_folder, state_home
from quire_cli.local.up import Up, UpOptions
from quire_cli.local.views import JsonLines
from quire_operator.errors import UserError

MACHINE = Machine(cpus=4, memory_bytes=16 * 2**30, gpu_memory_bytes=(), multiplies_bfloat16=False)
MODEL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
"""Its KV cache takes 512 bytes per token in float32: 2 × 2 layers × 2 KV heads × 16 × 4."""

DUMMY = {"extraArgs": ["--load-format", "dummy"]}
"""Fields of an engine that invents the weights."""
WRITES_ARGUMENTS = (sys.executable, "-c", "import sys, time; print(*sys.argv[1:], flush=True); time.sleep(600)")
"""The command of an engine that writes its arguments into its log."""


def document(name: str = "chat", **spec: object) -> str:
    body = {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": "file://./model"},
            "engine": DUMMY,
            "drain": {"timeout": "5s"},
            **spec,
        },
    }
    return json.dumps(body) + "\n---\n"


class Lines(io.StringIO):
    """An output that collects the JSON lines as they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, object]] = []
        self._moved = asyncio.Event()

    def write(self, text: str) -> int:
        if text.strip():
            self.events.append(json.loads(text))
            self._moved.set()
        return len(text)

    def of(self, event: str) -> list[dict[str, object]]:
        return [line for line in self.events if line["event"] == event]

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(120):
            while not holds():
                self._moved.clear()
                await self._moved.wait()


class Run:
    """A running ``quire up``."""

    def __init__(
        self,
        folder: Path,
        text: str,
        *,
        engine: tuple[str, ...] = FAKE_ENGINE,
        tick: float = 3600.0,
        port: int | None = None,
        exit_after: float | None = None,
    ) -> None:
        self.file = folder / "demo.yaml"
        self.file.write_text(text)
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        self.environ = {"XDG_STATE_HOME": str(folder / "state")}
        self.lines = Lines()
        self.options = UpOptions(
            file=self.file,
            port=port or free_port(),
            exit_after_seconds=exit_after,
            environ=self.environ,
            commands=Commands(engine=engine, gateway=installed_commands().gateway),
            machine=MACHINE,
            tick_seconds=tick,
            pace=HURRY,
        )
        self.up = Up(self.options, JsonLines(self.lines))

    @property
    def state(self) -> RunState:
        run = read(run_folder(state_home(self.environ), self.file))
        assert run is not None
        return run.state

    def pids(self) -> list[int]:
        return list(self.state.processes.values())

    async def ready(self) -> str:
        await self.lines.until(lambda: self.lines.of("ready"))
        return str(self.lines.of("ready")[0]["baseUrl"])


@asynccontextmanager
async def running(run: Run) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(run.up.run())
    try:
        yield task
    finally:
        if not task.done():
            run.up.stop()
            run.up.stop()
            await asyncio.wait((task,), timeout=120)


async def engine_arguments(run: Run) -> list[str]:
    """Return the arguments that an engine of ``WRITES_ARGUMENTS`` gets."""
    log = run_folder(state_home(run.environ), run.file) / "logs" / "chat-0.log"
    async with running(run), asyncio.timeout(120):
        while not log.exists() or not log.read_text().endswith("\n"):
            await asyncio.sleep(0.02)
    return log.read_text().split()


async def test_address_serves_all_documents_and_stop_cleans_up(tmp_path: Path) -> None:
    run = Run(tmp_path, document("chat", replicas=2) + document("code", replicas=0))
    async with running(run) as task, aiohttp.ClientSession() as http:
        base_url = await run.ready()
        await run.lines.until(lambda: {"chat-0", "chat-1"} <= {str(e["process"]) for e in run.lines.of("phase")})
        async with http.get(f"{base_url}/models") as response:
            assert {model["id"] for model in (await response.json())["data"]} == {"chat", "code"}
        pids = run.pids()
        assert len(pids) == 3
        run.up.stop()
        await asyncio.wait_for(task, 120)
    await until_dead(pids)
    assert [run.lines.events[-1]["event"], run.lines.of("kill")] == ["end", []]
    assert run.pids() == []
    assert not (run_folder(state_home(run.environ), run.file) / "endpoints.json").exists()


async def test_stop_ends_an_engine_that_tries_the_cpu(tmp_path: Path) -> None:
    wait = "import os, pathlib, time; pathlib.Path('pid.new').write_text(str(os.getpid()))"
    wait += "; os.rename('pid.new', 'pid'); time.sleep(3600)"
    run = Run(tmp_path, document(), engine=(sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {wait}"))
    run.up = Up(replace(run.options, machine=None), JsonLines(run.lines))
    async with running(run) as task:
        while not (tmp_path / "pid").exists():
            await asyncio.sleep(0.01)
        run.up.stop()
        await asyncio.wait_for(task, 120)
    await until_dead([int((tmp_path / "pid").read_text())])
    assert [event["event"] for event in run.lines.events] == ["end"]


async def test_run_notes_what_has_no_effect_and_ends_after_exit_after(tmp_path: Path) -> None:
    run = Run(tmp_path, document(rollout={"strategy": "Canary"}), exit_after=0.1)
    await asyncio.wait_for(run.up.run(), 120)
    events = [e["event"] for e in run.lines.events if e["event"] not in ("phase", "loading", "note")]
    assert events == ["start", "ready", "drain", "end"]
    (note,) = run.lines.of("note")
    assert "spec.rollout.strategy Canary has no effect here" in str(note["message"])


async def test_engine_gets_flags_of_its_spec_and_share_of_the_machine(tmp_path: Path) -> None:
    """A draft model that is not required is passed on if it is there."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(MODEL))
    speculation = {"method": "DraftModel", "draft": {"source": "file://./small"}, "required": False}
    text = document(
        autoscaling={"minReplicas": 1, "maxReplicas": 2},
        engine={"maxSequences": 2, "speculation": speculation, **DUMMY},
        auth={"secretName": "k"},
    )
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-mine")
    run = Run(tmp_path, text, engine=WRITES_ARGUMENTS)
    run.environ["QUIRE_API_KEY_FILE"] = str(keys)
    args = await engine_arguments(run)
    given = dict(zip(args, args[1:], strict=False))
    assert given["--threads"] == "2"
    assert given["--kv-cache-memory-bytes"] == str(2 * 512 * 2 * 512)  # two sequences of both models
    assert given["--model"] == str(tmp_path / "model")
    assert given["--host"] == "127.0.0.1"
    assert given["--api-key-file"] == str(keys)
    assert given["--spec-model"] == str(tmp_path / "small") and "--no-spec-required" in args


async def test_absent_optional_draft_model_is_left_out_and_said(tmp_path: Path) -> None:
    speculation = {"method": "DraftModel", "draft": {"source": "file://./small"}, "required": False}
    run = Run(tmp_path, document(engine={"speculation": speculation, **DUMMY}), engine=WRITES_ARGUMENTS)
    assert not {"--spec-model", "--no-spec-required"}.intersection(await engine_arguments(run))
    said = [str(line["message"]) for line in run.lines.of("download")]
    assert any("serves without its draft model file://./small" in line for line in said)


async def test_missing_required_draft_model_prevents_the_start(tmp_path: Path) -> None:
    speculation = {"method": "DraftModel", "draft": {"source": "file://./small"}}
    run = Run(tmp_path, document(engine={"speculation": speculation, **DUMMY}))
    with pytest.raises(ModelProblem) as caught:
        await run.up.run()
    assert "spec.engine.speculation.draft.source" in str(caught.value.details)


async def test_missing_key_file_prevents_the_start(tmp_path: Path) -> None:
    run = Run(tmp_path, document("open") + document("kept", auth={"secretName": "k"}))
    with pytest.raises(SpecProblem, match="kept: spec.auth names the Secret k"):
        await run.up.run()
    assert run.lines.events == []


async def test_decisions_are_printed_and_stored(tmp_path: Path) -> None:
    run = Run(tmp_path, document(autoscaling={"minReplicas": 1, "maxReplicas": 3}), tick=0.2)
    async with running(run):
        await run.ready()
        await run.lines.until(lambda: len(run.lines.of("decision")) >= 2)
        told = run.lines.of("decision")[0]
        assert (told["deployment"], told["changed"], told["from"], told["to"]) == ("chat", False, 1, 1)
        assert run.state.deployments["chat"].decisions[-1].last.message


async def test_long_start_is_reported_until_the_replica_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LOAD_SECONDS", "600")
    run = Run(tmp_path, document())
    async with running(run):
        await run.lines.until(lambda: len(run.lines.of("loading")) > 1)
        assert {line["process"] for line in run.lines.of("loading")} == {"chat-0"}
        assert not run.lines.of("ready")


async def test_first_request_starts_a_replica_between_two_ticks(tmp_path: Path) -> None:
    run = Run(tmp_path, document(replicas=0, autoscaling={"minReplicas": 0, "maxReplicas": 2}))
    async with running(run), aiohttp.ClientSession() as http:
        base_url = await run.ready()
        assert {line["process"] for line in run.lines.of("phase")} == {"gateway"}
        request = asyncio.create_task(http.post(f"{base_url}/completions", json={"model": "chat", "prompt": "?"}))
        await run.lines.until(lambda: run.lines.of("decision"))
        woken = run.lines.of("decision")[0]
        assert (woken["from"], woken["to"], woken["reason"]) == (0, 1, "HeldRequests")
        await run.lines.until(lambda: "chat-0" in {line["process"] for line in run.lines.of("phase")})
        request.cancel()


async def test_bounds_of_held_requests_reach_the_gateway(tmp_path: Path) -> None:
    rules = {"maxHeld": 5, "holdTimeout": "90s"}
    autoscaling = {"minReplicas": 0, "maxReplicas": 2, "scaleToZero": rules}
    run = Run(tmp_path, document(replicas=0, autoscaling=autoscaling) + document("code", replicas=0))
    async with running(run):
        await run.ready()
        text = (run_folder(state_home(run.environ), run.file) / "endpoints.json").read_text()
        holds = {model["name"]: model["hold"] for model in json.loads(text)["models"]}
    assert (holds["chat"]["timeout_seconds"], holds["chat"]["max_held"]) == (90.0, 5)
    assert (holds["code"]["timeout_seconds"], holds["code"]["max_held"]) == (None, None)


async def test_a_second_stop_does_not_wait_for_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DRAIN_SECONDS", "never")
    run = Run(tmp_path, document(drain={"timeout": "10m"}))
    async with running(run) as task:
        await run.ready()
        pids = run.pids()
        run.up.stop()
        await run.lines.until(lambda: run.lines.of("drain"))
        run.up.stop()
        await asyncio.wait_for(task, 120)
    await until_dead(pids)


@pytest.mark.parametrize(
    ("code", "problem", "message", "attempts"),
    [
        ("2", ModelProblem, "chat-0 cannot start", 1),
        ("1", StartProblem, r"chat-0 ended before it was ready \(exit code 1\)", 2),
    ],
)
async def test_engine_that_never_starts_ends_the_run_with_its_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    problem: type[UserError],
    message: str,
    attempts: int,
) -> None:
    monkeypatch.setenv("FAKE_EXIT", code)
    run = Run(tmp_path, document())
    with pytest.raises(problem, match=message) as caught:
        await asyncio.wait_for(run.up.run(), 120)
    assert caught.value.details == ("the model folder holds no tokenizer",), "of the last start only"
    assert len([e for e in run.lines.of("phase") if e["phase"] == "Failed"]) == attempts
    assert run.pids() == []


async def test_crashed_replica_is_reported_and_restarted(tmp_path: Path) -> None:
    run = Run(tmp_path, document())
    async with running(run), aiohttp.ClientSession() as http:
        await run.ready()
        url = next(e["url"] for e in run.lines.of("phase") if e["process"] == "chat-0")
        with pytest.raises(aiohttp.ClientError):
            await http.post(f"{url}/crash")
        await run.lines.until(lambda: [e for e in run.lines.of("phase") if e["phase"] == "Failed"])
        failed = next(e for e in run.lines.of("phase") if e["phase"] == "Failed")
        assert (failed["exitCode"], failed["reason"]) == (3, "CUDA error: out of cookies")
        await run.lines.until(lambda: run.lines.of("phase")[-1]["phase"] == "Ready")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"engine": {"kvCache": {"size": "1Ti"}, **DUMMY}}, "chat does not fit: a replica may use 16 GiB"),
        ({"engine": {"maxModelLength": 513, **DUMMY}}, "maxModelLength is 513, but the model supports 512 tokens"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "the replicas need 1 GPU "),
        ({"parallelism": {"tensor": 3}}, "spec.parallelism.tensor: must divide the . attention heads"),
    ],
)
async def test_invalid_setup_is_refused_before_any_start(tmp_path: Path, spec: dict[str, Any], message: str) -> None:
    run = Run(tmp_path, document(**spec))
    with pytest.raises(CapacityProblem, match=message):
        await run.up.run()
    assert run.lines.events == []


async def test_used_port_and_running_file_are_refused(tmp_path: Path) -> None:
    first = Run(tmp_path, document())
    async with running(first):
        await first.ready()
        again = Run(tmp_path, document())
        with pytest.raises(AlreadyRunning, match=f"is already running at http://127.0.0.1:{first.options.port}"):
            await again.up.run()
        other = tmp_path / "other"
        other.mkdir()
        elsewhere = Run(other, document(), port=first.options.port)
        with pytest.raises(AddressProblem, match=f"port {first.options.port} is in use"):
            await elsewhere.up.run()
        assert first.pids()


async def test_no_process_survives_sigkill(tmp_path: Path) -> None:
    """The command cannot clean up; the parent-death watchers do."""
    run = Run(tmp_path, document(replicas=2))
    script = (
        "import sys; from quire_cli import app; from quire_cli.local import up\n"
        "from quire_cli.local.machine import Commands, installed_commands\n"
        "gateway = installed_commands().gateway\n"
        "up.installed_commands = lambda: Commands(engine=tuple(sys.argv[1:3]), gateway=gateway)\n"
        "app.main(['up', '-f', sys.argv[3], '--port', sys.argv[4]])"
    )
    arguments = (*FAKE_ENGINE, str(run.file), str(run.options.port))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **run.environ},
    )
    assert process.stdout is not None
    async with asyncio.timeout(120):
        while (line := json.loads(await process.stdout.readline()))["event"] != "ready":
            assert line["event"] in ("start", "phase", "loading")
    pids = run.pids()
    assert len(pids) == 3
    process.kill()
    assert await asyncio.wait_for(process.wait(), 120) == -signal.SIGKILL
    await until_dead(pids)
    after = Run(tmp_path, document())
    async with running(after):
        await after.ready()
