"""``quire up`` with the real engine and gateway: it answers, survives a crash, and leaves no process."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from quire_local.harness import is_alive, session_members, until_dead

from quire_cli.local.process import free_port
from quire_cli.local.state import read, run_folder, state_home
from quire_common.contract.engine import LIVE_PATH, METRICS_PATH, READY_PATH
from quire_common.metrics_page import points
from quire_operator.autoscaling.engine_metrics import NAMES, SPECULATION_NAMES

MODEL = Path(__file__).parents[3] / "examples" / "models" / "quire-demo"
DOCUMENT = """\
apiVersion: quire.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {source: "file://%s", servedName: org/tiny}
  engine: {maxSequences: 2, maxBatchedTokens: 64, maxModelLength: 512, kvCache: {size: 8Mi}, dtype: Float32}
  drain: {timeout: 10s}
"""
SLOW_START_SECONDS = 200
"""On a machine that is busy with the rest of the tests, importing torch alone can take half a minute."""


@dataclass
class Quire:
    """A running quire command."""

    process: Process
    file: Path
    environ: dict[str, str]
    base_url: str

    async def event(self, kind: str, **fields: object) -> dict[str, object]:
        """Return the next event of this kind with these fields."""
        assert self.process.stdout is not None
        async with asyncio.timeout(SLOW_START_SECONDS):
            while line := await self.process.stdout.readline():
                told: dict[str, object] = json.loads(line)
                if told["event"] == kind and fields.items() <= told.items():
                    return told
        raise AssertionError(f"ended without {kind} {fields}")

    def leaders(self) -> dict[str, int]:
        """Return the live processes that it started itself, by name."""
        run = read(run_folder(state_home(self.environ), self.file))
        assert run is not None and run.is_live
        return {name: pid for name, pid in run.state.processes.items() if is_alive(pid)}

    def processes(self) -> list[int]:
        """Return these processes and all their descendants."""
        return [member for leader in self.leaders().values() for member in session_members(leader)]

    def replica_url(self) -> str:
        file = run_folder(state_home(self.environ), self.file) / "endpoints.json"
        url: str = json.loads(file.read_text())["models"][0]["endpoints"][0]["url"]
        return url


@pytest.fixture
async def quire(tmp_path: Path) -> AsyncIterator[Quire]:
    file, port = tmp_path / "f.yaml", free_port()
    file.write_text(DOCUMENT % MODEL)
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire_cli", "up", "-f", str(file), "--port", str(port)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environ},
    )
    yield Quire(process, file, environ, f"http://127.0.0.1:{port}/v1")
    if process.returncode is None:
        process.kill()
        await process.wait()


async def test_up_serves_recovers_and_leaves_no_process(quire: Quire) -> None:
    ready = await quire.event("ready")
    assert ready["baseUrl"] == quire.base_url
    async with openai.AsyncOpenAI(base_url=quire.base_url, api_key="none", max_retries=0) as client:
        assert [model.id for model in (await client.models.list()).data] == ["org/tiny"]
        answer = await client.chat.completions.create(
            model="org/tiny", messages=[{"role": "user", "content": "What is a list?"}], max_tokens=8, temperature=0
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 8
        stream = await client.completions.create(
            model="org/tiny", prompt="A list", max_tokens=8, stream=True, extra_body={"ignore_eos": True}
        )
        assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "length"

        async with httpx.AsyncClient(base_url=quire.replica_url(), trust_env=False) as replica:
            assert (await replica.get(LIVE_PATH)).status_code == (await replica.get(READY_PATH)).status_code == 200
            served = {point.name for point in points((await replica.get(METRICS_PATH)).text, NAMES)}
            assert served == NAMES - SPECULATION_NAMES, "the autoscaler reads what the engine serves"

        os.kill(quire.leaders()["chat-0"], signal.SIGKILL)
        assert (await quire.event("phase", process="chat-0", phase="Failed"))["exitCode"] == -signal.SIGKILL
        await quire.event("phase", process="chat-0", phase="Ready")
        again = await client.completions.create(
            model="org/tiny", prompt="A list", max_tokens=2, extra_body={"ignore_eos": True}
        )
        assert again.choices[0].finish_reason == "length"

    everything = quire.processes()
    assert len(everything) >= 3, "the gateway, the engine's server and its step loop"
    quire.process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(quire.process.wait(), 60) == 0
    await until_dead(everything)


async def test_sigkill_during_loading_leaves_no_process(quire: Quire) -> None:
    await quire.event("phase", process="chat-0", phase="Loading")
    async with asyncio.timeout(SLOW_START_SECONDS):
        while len(everything := quire.processes()) < 3:  # the gateway, the engine's server and its step loop
            await asyncio.sleep(0.05)
    quire.process.kill()
    await quire.process.wait()
    await until_dead(everything)
