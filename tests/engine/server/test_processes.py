"""quire-engine as processes: started, used, killed, drained. The fake runner starts within a second."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_children import engine_process

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder without weights, whose tokenizer has the fake runner's 512 ids."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model") / "fake"
    path.mkdir()
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġword{number}" for number in range(256))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": "fake", "vocab_size": 512}))
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return path


@dataclass
class Process:
    child: asyncio.subprocess.Process
    address: str
    log: list[str]
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI

    def stream(self, **fields: Any) -> Any:
        return self.openai.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}, **fields
        )

    async def status(self, path: str) -> int:
        return (await self.http.get(path)).status_code

    async def until(self, path: str, status: int) -> None:
        async with asyncio.timeout(20):
            while await self.status(path) != status:
                await asyncio.sleep(0.02)

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.http.get("/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def engine_pid(self) -> int:
        return engine_process(self.child.pid)


@asynccontextmanager
async def started(folder: Path, *flags: str, **runner: Any) -> AsyncIterator[Process]:
    child = await asyncio.create_subprocess_exec(
        *(
            *(sys.executable, "-m", "quire_engine.server.fake", json.dumps(runner)),
            *("--model", str(folder), "--host", "127.0.0.1", "--port", "0", "--threads", "1", *flags),
        ),
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stderr is not None
    log: list[str] = []
    try:
        async with asyncio.timeout(30):
            while not (found := re.search(r"listening on (http://\S+);", "".join(log))):
                line = await child.stderr.readline()
                assert line, "".join(log)
                log.append(line.decode())
        reading = asyncio.create_task(_collect(child.stderr, log))
        address = found[1]
        async with (
            httpx.AsyncClient(base_url=address, timeout=20) as http,
            openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=20) as client,
        ):
            process = Process(child, address, log, http, client)
            await process.until("/readyz", 200)
            yield process
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
    await reading


async def _collect(stream: asyncio.StreamReader, log: list[str]) -> None:
    while line := await stream.readline():
        log.append(line.decode())


async def read_all(chunks: Any) -> int:
    """Return the number of tokens in a stream of openai's client, counted as words."""
    return sum(1 for chunk in [chunk async for chunk in chunks] if chunk.choices and chunk.choices[0].delta.content)


async def test_sigterm_lets_every_stream_finish(folder: Path) -> None:
    async with started(folder, step_seconds=0.01) as process:
        streams = [await process.stream(max_tokens=60) for _ in range(8)]
        process.child.send_signal(signal.SIGTERM)
        await process.until("/readyz", 503)
        assert await process.status("/livez") == 200
        with pytest.raises(openai.InternalServerError, match="draining"):
            await process.stream(max_tokens=1)
        finished = await asyncio.gather(*(_finish_reason(chunks) for chunks in streams))
        assert finished == ["length"] * 8
        assert await asyncio.wait_for(process.child.wait(), 60) == 0


async def _finish_reason(chunks: Any) -> str | None:
    reason = None
    async for chunk in chunks:
        if chunk.choices:
            reason = chunk.choices[0].finish_reason or reason
    return reason


async def test_requests_that_outlast_the_drain_timeout_get_an_error(folder: Path) -> None:
    async with started(folder, "--drain-timeout", "300ms", step_seconds=0.02) as process:
        chunks = await process.stream(max_tokens=4000)
        process.child.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="drain timeout of 0.3 s is over"):
            await _finish_reason(chunks)
        assert await asyncio.wait_for(process.child.wait(), 60) == 0


async def test_second_ctrl_c_stops_immediately(folder: Path) -> None:
    async with started(folder, step_seconds=0.02) as process:
        chunks = await process.stream(max_tokens=4000)
        process.child.send_signal(signal.SIGINT)
        await process.until("/readyz", 503)
        process.child.send_signal(signal.SIGTERM)  # a supervisor may send it; it is not a second Ctrl-C
        await asyncio.sleep(0.1)
        assert process.child.returncode is None
        process.child.send_signal(signal.SIGINT)
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            await _finish_reason(chunks)
        assert await asyncio.wait_for(process.child.wait(), 60) == 130


async def test_disconnected_clients_leave_no_blocks(folder: Path) -> None:
    async with started(folder, "--max-num-seqs", "32", step_seconds=0.002) as process:
        chance = random.Random(5)

        async def ask() -> bool:
            leaves = chance.random() < 0.5
            chunks = await process.stream(max_tokens=3000 if leaves else 40)
            count = 0
            async for _ in chunks:
                count += 1
                if leaves and count > 5:
                    await chunks.close()
                    return False
            return True

        outcomes = await asyncio.gather(*(ask() for _ in range(120)))
        assert 20 < sum(outcomes) < 100
        async with asyncio.timeout(60):
            while await process.metric("vllm:num_requests_running") or await process.metric(
                "vllm:num_requests_waiting"
            ):
                await asyncio.sleep(0.02)
        assert await process.metric("quire_kv_blocks", state="used") == 0
        assert await process.metric("vllm:request_success_total", finished_reason="length") == sum(outcomes)
        assert await process.metric("vllm:request_success_total", finished_reason="abort") == 120 - sum(outcomes)


async def test_a_killed_engine_process_fails_only_running_requests(folder: Path) -> None:
    async with started(folder, step_seconds=0.02) as process:
        streams = [await process.stream(max_tokens=3000) for _ in range(3)]
        before = await process.engine_pid()
        os.kill(before, signal.SIGKILL)
        for chunks in streams:
            with pytest.raises(openai.APIError, match="the engine stopped while this request was under way"):
                await _finish_reason(chunks)
        await process.until("/readyz", 200)
        assert await read_all(await process.stream(max_tokens=5)) >= 1
        assert await process.engine_pid() != before
        assert await process.metric("quire_engine_restarts_total") == 1
        assert await process.metric("vllm:request_success_total", finished_reason="error") == 3


async def test_request_beyond_the_queue_limit_gets_retry_after(folder: Path) -> None:
    flags = ("--max-num-seqs", "1", "--max-queued-requests", "2")
    async with started(folder, *flags, step_seconds=0.02) as process:
        running = await process.stream(max_tokens=3000)
        waiting = [asyncio.create_task(process.stream(max_tokens=3000)) for _ in range(2)]
        async with asyncio.timeout(60):
            while await process.metric("vllm:num_requests_waiting") < 2:
                await asyncio.sleep(0.02)
        with pytest.raises(openai.RateLimitError) as caught:
            await process.stream(max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        for task in waiting:
            task.cancel()
        await running.close()
        async with asyncio.timeout(60):
            while await process.metric("vllm:num_requests_waiting"):
                await asyncio.sleep(0.02)
        assert await read_all(await process.stream(max_tokens=3)) >= 1


async def test_the_same_request_gets_the_same_text_streamed_or_not(folder: Path) -> None:
    async with started(folder) as process:
        body = {"model": "fake", "prompt": "once upon", "max_tokens": 50, "ignore_eos": True}
        whole = (await process.http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        chunks = await process.openai.completions.create(
            model="fake", prompt="once upon", max_tokens=50, stream=True, extra_body={"ignore_eos": True}
        )
        assert "".join([chunk.choices[0].text async for chunk in chunks]) == whole and len(whole) > 40
        too_long = await process.http.post("/v1/completions", json={**body, "prompt": "x" * 5000})
        assert too_long.status_code == 400 and "4096 tokens" in too_long.json()["error"]["message"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire_engine", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        ((), 2, "--model is missing"),
        (("--model", "/none"), 2, "folder /none does not exist"),
        (("--model", "{folder}", "--prot", "1"), 2, "did you mean --port?"),
        (
            ("--model", "{folder}", "--load-format", "dummy", "--host", "127..0.1"),
            1,
            "--host 127..0.1 is not an address",
        ),
        (("--model", "{folder}"), 2, "no *.safetensors"),
        (("--model", "{folder}", "--load-format", "dummy", "--port", "{taken}"), 1, "is in use; "),
        (
            ("--model", "{folder}", "--load-format", "dummy", "--port", "0", "--api-key-file", "/none"),
            2,
            "cannot be read",
        ),
        (
            ("--model", "{folder}", "--load-format", "dummy", "--port", "0", "--chat-template", "/none"),
            2,
            "cannot be read",
        ),
    ],
)
def test_user_errors_fit_one_screen_without_a_traceback(
    folder: Path, arguments: tuple[str, ...], status: int, part: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        values = {"folder": folder, "taken": taken.getsockname()[1]}
        done = run(*(argument.format(**values) for argument in arguments))
    assert done.returncode == status and part in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 5 and done.stdout == ""


def test_corrupt_tokenizer_is_reported_in_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "tokenizer.json").write_text("{")
    done = run("--model", str(tmp_path), "--load-format", "dummy", "--port", "0")
    assert done.returncode == 2 and "tokenizer.json" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_starts_leaves_nothing_behind(number: int, tmp_path: Path) -> None:
    demo = Path(__file__).parents[3] / "examples" / "models" / "quire-demo"
    command = [sys.executable, "-m", "quire_engine", "--model", str(demo), "--host", "127.0.0.1", "--port", "0"]

    def heard() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell ignore it

    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        while not list(tmp_path.glob("quire-*/engine")):
            time.sleep(0.01)
            assert process.poll() is None
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_help_version_and_schema_need_no_model() -> None:
    assert "usage: quire-engine --model DIR" in run("--help").stdout
    assert run("--version").stdout == "quire-engine 0.1.0\n"
    assert json.loads(run("--flag-schema").stdout)["required"] == ["model"]


def test_the_api_process_imports_no_tensor_library() -> None:
    program = (
        "import sys, quire_engine.__main__, quire_engine.server.serve\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'quire_kernels'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
