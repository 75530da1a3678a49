#!/usr/bin/env python3
"""Build llama.cpp's server for this very processor, in ~/.cache/quire/peers ($XDG_CACHE_HOME).

  python -m benchmarks.peers.install_llama_cpp

The source is the one that llama-cpp-python's source distribution on PyPI carries (77 MB). Needs a C++ compiler (Debian:
`apt-get install g++`); cmake and ninja come from PyPI. Its converter of models gets an environment beside it, with
torch (linked from uv's cache where that lies on the same disk; TORCH_SPEC names another). It compiles 206
files, at the lowest priority: some minutes of two idle cores, 46 of two busy ones.
"""

import os
import shutil
import tarfile
from pathlib import Path

from benchmarks.peers.peer_catalogue import LLAMA_CPP, TORCH
from benchmarks.peers.peer_environments import PeerError, Step, Workshop, command_line

SOURCE = "source"
SERVER = f"{SOURCE}/build/bin/llama-server"
_CONVERTER_REQUIREMENTS = ("transformers==4.57.6", "gguf", "sentencepiece", "protobuf>=4.21,<5", "safetensors", "numpy")
_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_NATIVE": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


def vendored_name(member: str) -> str | None:
    """Where a file of the source distribution goes under SOURCE; None if it is not llama.cpp's."""
    parts = Path(member).parts
    ours = parts[1:3] == ("vendor", "llama.cpp") and len(parts) > 3
    # What is left of its repository names one that is not here, and the build would ask git about it.
    return str(Path(*parts[3:])) if ours and parts[3] != ".git" else None


def _create_environment(shop: Workshop) -> None:
    if shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("clang++") is None:
        raise PeerError("a C++ compiler is missing; on Debian and Ubuntu: apt-get install g++")
    shop.create_environment()
    torch = os.environ.get("TORCH_SPEC") or f"torch=={TORCH}"
    shop.install("pip", "cmake", "ninja", torch, *_CONVERTER_REQUIREMENTS)


def _fetch_source(shop: Workshop) -> None:
    wanted = f"llama-cpp-python=={LLAMA_CPP.version}"
    pip = (shop.peer.python, "-m", "pip", "--disable-pip-version-check", "download")
    shop.run(*pip, "--no-deps", "--no-binary", "llama-cpp-python", wanted, "-d", "download")
    (archive,) = (shop.folder / "download").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        members = []
        for member in packed.getmembers():
            if (name := vendored_name(member.name)) is not None:
                members.append(member.replace(name=name))
        packed.extractall(shop.folder / SOURCE, members=members, filter="data")
    shutil.rmtree(shop.folder / "download")


def _build(shop: Workshop) -> None:
    tools = {"PATH": f"{shop.peer.environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    options = [f"-D{name}={value}" for name, value in _OPTIONS.items()]
    shop.run("cmake", "-S", SOURCE, "-B", f"{SOURCE}/build", "-G", "Ninja", *options, environment=tools)
    shop.run("cmake", "--build", f"{SOURCE}/build", "--target", "llama-server", environment=tools)


def _try_it(shop: Workshop) -> None:
    shop.run(shop.folder / SERVER, "--version")


STEPS = (
    Step(what="cmake, ninja and what its converter of models needs", do=_create_environment),
    Step(what="the source, out of llama-cpp-python's source distribution (77 MB)", do=_fetch_source),
    Step(what="compiling llama-server for this processor (minutes)", do=_build),
    Step(what="a first start of the server", do=_try_it),
)

if __name__ == "__main__":
    command_line(__doc__, {"llama.cpp": (LLAMA_CPP, STEPS)})
