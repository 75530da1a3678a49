"""quire-engine as real processes on a loopback port: the demo model, or its tokenizer with the fake runner."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_server
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_children import engine_process

MODEL = Path(__file__).parents[2] / "examples" / "models" / "quire-demo"
VOCABULARY = 4096
KEY = "test-key-1"


@dataclass
class EngineServer:
    """A server of the model ``demo``. Every request of its clients has the key."""

    child: "subprocess.Popen[str]"
    address: str
    http: httpx.Client
    openai: openai.OpenAI
    key: str = KEY
    log: list[str] = field(default_factory=list)

    @property
    def host_and_port(self) -> tuple[str, int]:
        url = httpx.URL(self.address)
        assert url.port is not None
        return url.host, url.port

    def engine_pid(self) -> int:
        return engine_process(self.child.pid)

    def ends(self) -> int:
        """Stop the server as Kubernetes does, and return its exit status."""
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(60)

    def metric(self, name: str, **labels: str) -> float:
        text = self.http.get("/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def until(self, true: Callable[[], bool], *, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, f"not within {seconds} s"
            time.sleep(0.02)

    def until_status(self, path: str, status: int, *, seconds: float = 20) -> None:
        self.until(lambda: self.http.get(path).status_code == status, seconds=seconds)

    def assert_nothing_is_left(self) -> None:
        """Assert that no request runs or waits and that all blocks are free."""
        self.until(lambda: not self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting"))
        self.until(lambda: self.metric("quire_kv_blocks", state="used") == 0)


@contextmanager
def _engine_server(key_file: Path, *flags: str, fake: dict[str, Any] | None = None) -> Iterator[EngineServer]:
    program = ["-m", "quire_engine"]
    if fake is not None:
        program = ["-m", "fake_server", json.dumps({"vocab_size": VOCABULARY, **fake})]
    command = [sys.executable, *program, "--model", str(MODEL), "--served-model-name", "demo"]
    command += ["--host", "127.0.0.1", "--port", "0", "--threads", "1", "--api-key-file", str(key_file)]
    if fake is None:
        command += ["--kv-cache-memory-bytes", "32MiB"]
    log: list[str] = []
    reading = threading.Thread(target=lambda: log.extend(child.stderr or ()))
    paths = (str(Path(fake_server.__file__).parent), os.environ.get("PYTHONPATH"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with subprocess.Popen([*command, *flags], env=environment, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        try:
            while " ready: demo" not in "".join(log[-1:]):
                log.append(child.stderr.readline())
                assert log[-1], "".join(log)
            found = re.search(r"listening on (\S+);", "".join(log))
            assert found is not None, "".join(log)
            reading.start()
            with (
                httpx.Client(base_url=found[1], timeout=60, headers={"authorization": f"Bearer {KEY}"}) as http,
                openai.OpenAI(base_url=f"{found[1]}/v1", api_key=KEY, max_retries=0, timeout=60) as client,
            ):
                yield EngineServer(child, found[1], http, client, log=log)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
            if reading.ident is not None:
                reading.join()


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[EngineServer]]:
    """Return a factory of servers.

    ``with start_server("--max-num-seqs", "4", fake={"step_seconds": 0.01}) as server``
    """
    key_file = tmp_path_factory.mktemp("keys") / "api"
    key_file.write_text(f"tester:{KEY}\n")
    return lambda *flags, fake=None: _engine_server(key_file, *flags, fake=fake)


@pytest.fixture(scope="session")
def demo_server(start_server: Callable[..., AbstractContextManager[EngineServer]]) -> Iterator[EngineServer]:
    """Yield a server of the demo model, which checks its blocks after every step."""
    with start_server("--check-integrity") as server:
        yield server
