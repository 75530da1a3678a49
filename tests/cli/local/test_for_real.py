"""``quire up`` with the real engine and gateway: it answers, and leaves no process."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import httpx
import openai
import pytest
from quire_local.harness import session_members, until_dead

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
SLOW_START_SECONDS = 600
"""After a change of the CPU kernels, the engine compiles them: minutes on a machine that is busy with other tests."""


@pytest.mark.timeout(SLOW_START_SECONDS + 100)
async def test_up_serves_and_leaves_no_process(tmp_path: Path) -> None:
    file, port = tmp_path / "f.yaml", free_port()
    file.write_text(DOCUMENT % MODEL)
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire_cli", "up", "-f", str(file), "--port", str(port)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environ},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(SLOW_START_SECONDS):
            while (told := json.loads(await process.stdout.readline()))["event"] != "ready":
                pass
        assert told["baseUrl"] == f"http://127.0.0.1:{port}/v1"
        await expect_answers(told["baseUrl"])
        folder = run_folder(state_home(environ), file)
        replica = json.loads((folder / "endpoints.json").read_text())["models"][0]["endpoints"][0]["url"]
        await expect_signs_of_life(replica)
        run = read(folder)
        assert run is not None and run.is_live
        everything = [member for leader in run.state.processes.values() for member in session_members(leader)]
        assert len(everything) >= 3, "the gateway, the engine's server and its step loop"
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 0
        await until_dead(everything)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def expect_answers(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        assert [model.id for model in (await client.models.list()).data] == ["org/tiny"]
        answer = await client.chat.completions.create(
            model="org/tiny", messages=[{"role": "user", "content": "What is a list?"}], max_tokens=8, temperature=0
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 8
        stream = await client.completions.create(
            model="org/tiny", prompt="A list", max_tokens=8, stream=True, extra_body={"ignore_eos": True}
        )
        assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "length"


async def expect_signs_of_life(replica_url: str) -> None:
    async with httpx.AsyncClient(base_url=replica_url, trust_env=False) as replica:
        assert (await replica.get(LIVE_PATH)).status_code == (await replica.get(READY_PATH)).status_code == 200
        served = {point.name for point in points((await replica.get(METRICS_PATH)).text, NAMES)}
        assert served == NAMES - SPECULATION_NAMES, "the autoscaler reads what the engine serves"
