"""Faults of an engine for canaries that must be rolled back. Python imports this module when it starts.

    CANARY_FAULT=errors quire-engine …    # with this file as sitecustomize.py on the PYTHONPATH

``errors`` answers every hundredth request with status 500, ``layer`` multiplies the weights of one decoder layer by
1.5, and ``leak`` keeps 8 MiB for every request. The pods of the end-to-end scenario of canaries mount this
file. The engine itself knows nothing of it.
"""

import os
import sys
from pathlib import Path
from typing import Any

ONE_IN = 100
SCALE = 1.5
LEAKED_BYTES = 8 << 20

_kept: list[bytes] = []


def on_each_request(fault: str) -> None:
    """Wrap the HTTP application of the process that serves requests."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse

    serve: Any = Starlette.__call__
    count = 0

    async def call(self: Any, scope: Any, receive: Any, send: Any) -> None:
        nonlocal count
        is_request = scope["type"] == "http" and scope["method"] == "POST"
        count += is_request
        if is_request and fault == "leak":
            # The pages are written, so that they are resident.
            _kept.append(b"x" * LEAKED_BYTES)
        if is_request and fault == "errors" and count % ONE_IN == 0:
            answer = JSONResponse({"error": {"message": "broken", "code": "broken"}}, status_code=500)
            await answer(scope, receive, send)
            return
        await serve(self, scope, receive, send)

    Starlette.__call__ = call  # type: ignore[method-assign]


def perturb_a_layer() -> None:
    """Scale what the process that computes reads from the checkpoint for one layer."""
    from quire_engine.model.weights import Safetensors

    read: Any = Safetensors.read

    def scaled(self: Any, name: str, part: Any = None, split: Any = None) -> Any:
        tensor = read(self, name, part, split)
        return tensor * SCALE if ".layers.1." in name and "proj" in name else tensor

    Safetensors.read = scaled  # type: ignore[method-assign]


def is_loop(command: list[str]) -> bool:
    """Return whether a command is the process that computes."""
    return "quire_engine.ipc.loop" in command


def is_server(command: list[str]) -> bool:
    """Return whether a command is the process that serves requests."""
    return any(Path(word).name == "quire-engine" for word in command) or "quire_engine" in command


def install(fault: str, command: list[str]) -> None:
    """Install the fault if this process is the one that it concerns."""
    if fault == "layer" and is_loop(command):
        perturb_a_layer()
    if fault in ("errors", "leak") and is_server(command):
        on_each_request(fault)


install(os.environ.get("CANARY_FAULT", ""), sys.orig_argv)
