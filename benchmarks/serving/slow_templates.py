#!/usr/bin/env python3
"""Send long conversations to a server with each of many real chat templates, and probe /livez meanwhile.

    python -m benchmarks.serving.slow_templates [--messages 10000] [--templates DIR] [--json FILE]

A chat template is a program whose cost the messages decide; many real ones take quadratic time. Each template gets a
server of its own, with the tokenizer of the demo model and no model, so that only the API process and its workers run.
A process of its own asks for /livez every 5 ms. The templates are those of llama.cpp's source, which ``make peers`` or
the tests have unpacked.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.peers.peer_catalogue import LLAMA_CPP
from benchmarks.report import (
    DEMO_MODEL,
    ROOT,
    at_least_one,
    interrupt_on_terminate,
    machine,
    parser,
    progress,
    show_table,
    write_json,
)
from benchmarks.serving.comparison.process_tree import free_port, running
from benchmarks.serving.livez_probe import Answers
from benchmarks.serving.soak.servers import status

CONTEXT = 1 << 20
_PROBE_SECONDS = 0.005
_START_SECONDS = 120
_TEMPLATES = "vendor/llama.cpp/models/templates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The answer to one conversation, and the longest time without an answer of /livez while it was rendered."""

    template: str
    conversation: str
    status: int
    code: str
    seconds: float
    longest_livez_ms: float
    probe_late_ms: float
    """The longest delay of the probe's own sleeps: on a busy machine no server answers sooner."""


def conversations(count: int) -> dict[str, list[dict[str, Any]]]:
    """Return conversations of so many messages: plain turns, and an agent's with tool calls."""
    turns = [{"role": role, "content": f"turn {n}"} for n in range(-(-count // 2)) for role in ("user", "assistant")]
    agent: list[dict[str, Any]] = [{"role": "user", "content": "Add them."}]
    for number in range((count - 1) // 2):
        call = {"name": "add", "arguments": json.dumps({"a": number})}
        call_id = f"call{number:05}"
        agent += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": call_id, "content": str(number)},
        ]
    return {"turns": turns[:count], "tool calls": agent}


def find_templates() -> Path | None:
    """Return the folder of llama.cpp's templates among the installed servers and the cache of the tests."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"
    tested = sorted(cache.glob(f"llama-cpp-python-*-source/{_TEMPLATES}"))
    found = [cache / "peers" / f"{LLAMA_CPP.name}-{LLAMA_CPP.version}" / "source/models/templates", *tested]
    return next((folder for folder in found if folder.is_dir()), None)


async def measure_template(template: Path, count: int, log: Path) -> list[Rendered]:
    """Start a server with the template and send it each conversation."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "fake_server", '{"step_seconds": 0.001}', "--model", str(DEMO_MODEL)),
        *("--port", str(port), "--chat-template", str(template), "--max-model-len", str(CONTEXT)),
        *("--hf-overrides", json.dumps({"max_position_embeddings": CONTEXT})),
    ]
    url = f"http://127.0.0.1:{port}"
    found = []
    with running(command, {}, log):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client:
            async with asyncio.timeout(_START_SECONDS):
                while await status(client, f"{url}/readyz") != 200:
                    await asyncio.sleep(0.05)
            for name, messages in conversations(count).items():
                with probing(port) as answers:
                    began = time.monotonic()
                    answered, code = await _chat(client, url, messages)
                    seconds = time.monotonic() - began
                (livez,) = answers
                found.append(
                    Rendered(
                        template=template.stem,
                        conversation=name,
                        status=answered,
                        code=code,
                        seconds=seconds,
                        longest_livez_ms=livez.longest_ms,
                        probe_late_ms=livez.late_ms,
                    )
                )
    return found


@contextmanager
def probing(port: int) -> Iterator[list[Answers]]:
    """Probe /livez of the server at a port; the list has the probe's answers once the block has ended."""
    command = [sys.executable, "-m", "benchmarks.serving.livez_probe", str(_PROBE_SECONDS), f"server=127.0.0.1:{port}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    answers: list[Answers] = []
    try:
        yield answers
    finally:
        output, _ = process.communicate(b"")
        answers += [Answers(**each) for each in json.loads(output)]


async def _chat(client: aiohttp.ClientSession, url: str, messages: list[dict[str, Any]]) -> tuple[int, str]:
    body = {"messages": messages, "max_completion_tokens": 1}
    async with client.post(f"{url}/v1/chat/completions", json=body) as response:
        content = await response.json()
        return response.status, "" if response.status == 200 else content["error"].get("code") or ""


def show(rendered: Sequence[Rendered]) -> None:
    """Print the longest gaps, and how the conversations were answered."""
    slowest = sorted(rendered, key=lambda each: each.longest_livez_ms, reverse=True)[:12]
    answers = Counter(each.code or str(each.status) for each in rendered)
    notes = [
        f"{len(rendered)} conversations: " + ", ".join(f"{count} {code}" for code, count in answers.most_common()),
        f"longest /livez: {slowest[0].longest_livez_ms:.0f} ms; over 50 ms: "
        f"{sum(each.longest_livez_ms > 50 for each in rendered)}",
        machine(),
    ]
    columns = ("template", "conversation", "answer", "seconds", "longest /livez ms", "probe late ms")
    rows = [
        (
            each.template,
            each.conversation,
            each.code or str(each.status),
            f"{each.seconds:.2f}",
            f"{each.longest_livez_ms:.0f}",
            f"{each.probe_late_ms:.0f}",
        )
        for each in slowest
    ]
    show_table("Chat templates", columns, rows, notes)


def measure(arguments: Namespace) -> list[Rendered]:
    """Measure every template of the folder. Raise SystemExit where it has no templates."""
    folder = arguments.templates or find_templates()
    templates = sorted(folder.glob("*.jinja")) if folder is not None else []
    if not templates:
        raise SystemExit("no templates found; install llama.cpp (make peers) or name a folder with --templates")
    log = Path("/dev/null")
    rendered: list[Rendered] = []
    with progress() as shown:
        for template in shown.track(templates, description="templates"):
            rendered += asyncio.run(measure_template(template, arguments.messages, log))
    return rendered


def main() -> None:
    """Measure all templates and print the longest gaps."""
    options = parser(__doc__, plot=False)
    options.add_argument("--messages", type=at_least_one, default=10_000, help="of a conversation (default: 10000)")
    options.add_argument("--templates", type=Path, metavar="DIR", help="*.jinja files (default: llama.cpp's)")
    arguments = options.parse_args()
    interrupt_on_terminate()
    rendered = measure(arguments)
    show(rendered)
    if arguments.json is not None:
        write_json(arguments.json, {"machine": machine(), "rendered": [asdict(each) for each in rendered]})


if __name__ == "__main__":
    main()
