#!/usr/bin/env python3
"""Build llama.cpp's server and its CPU code for several levels of CPU, in ~/.cache/quire/peers ($XDG_CACHE_HOME).

  python -m benchmarks.peers.install_llama_cpp

The source is part of llama-cpp-python's source distribution on PyPI (77 MB). It needs a C++ compiler (Debian: `apt-get
install g++`); cmake and ninja come from PyPI. Its model converter gets its own environment with torch (linked from uv's
cache if that is on the same disk; TORCH_SPEC names another). It compiles about 260 files, at the lowest priority: some
minutes on two idle cores, an hour on two busy ones.

The compute code is one library per level of CPU (``LEVELS``), in a folder apart from the server, which therefore loads
only the one that GGML_BACKEND_PATH names.
"""

import os
import shutil
import tarfile
from pathlib import Path

from benchmarks.peers.peer_catalogue import LLAMA_CPP, TORCH
from benchmarks.peers.peer_environments import PeerError, Step, Workshop, command_line

SOURCE = "source"
SERVER = f"{SOURCE}/build-avx2/bin/llama-server"
_CONVERTER_REQUIREMENTS = ("transformers==4.57.6", "gguf", "sentencepiece", "protobuf>=4.21,<5", "safetensors", "numpy")
LIBRARIES = "libraries"
_AVX512 = ("AVX512", "AVX512_VNNI")
LEVELS = {
    "avx2": (),
    "avx512": _AVX512,
    "avx512-bf16": (*_AVX512, "AVX512_VBMI", "AVX512_BF16"),
    "amx": (*_AVX512, "AVX512_VBMI", "AVX512_BF16", "AMX_TILE", "AMX_INT8", "AMX_BF16"),
}
"""The instructions of each level beyond AVX2, FMA, BMI2 and F16C, by the names of llama.cpp's build options."""
_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "GGML_NATIVE": "OFF",
    "GGML_BACKEND_DL": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


def vendored_name(member: str) -> str | None:
    """Return the path of a file of the source distribution below SOURCE; None if it is not llama.cpp's."""
    parts = Path(member).parts
    ours = parts[1:3] == ("vendor", "llama.cpp") and len(parts) > 3
    # The rest of its repository names one that is absent, and the build would query git for it.
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
    (shop.folder / LIBRARIES).mkdir()
    # The first level's build also creates the server. The others share only ggml's interface with it.
    for level, target in zip(LEVELS, ("llama-server", *["ggml-cpu"] * (len(LEVELS) - 1)), strict=True):
        _build_level(shop, level, target)


def _build_level(shop: Workshop, level: str, target: str) -> None:
    tools = {"PATH": f"{shop.peer.environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    build = _build_folder(level)
    options = [f"-D{name}={value}" for name, value in _OPTIONS.items()]
    options += [f"-DGGML_{feature}=ON" for feature in LEVELS[level]]
    shop.run("cmake", "-S", SOURCE, "-B", build, "-G", "Ninja", *options, environment=tools)
    shop.run("cmake", "--build", build, "--target", target, environment=tools)
    built = shop.folder / build / "bin" / "libggml-cpu.so"
    shutil.copyfile(built.resolve(), shop.folder / level_library(level))
    # The server would load it from its own folder, whatever GGML_BACKEND_PATH names.
    for name in built.parent.glob("libggml-cpu.so*"):
        name.unlink()


def _build_folder(level: str) -> str:
    return f"{SOURCE}/build-{level}"


def level_library(level: str) -> str:
    """Return the library that computes at a level of ``LEVELS``, within the peer's folder."""
    return f"{LIBRARIES}/libggml-cpu-{level}.so"


def _try_it(shop: Workshop) -> None:
    # The version is printed without a library; only loading one shows that it fits the server.
    lowest = {"GGML_BACKEND_PATH": str(shop.folder / level_library("avx2"))}
    shop.run(shop.folder / SERVER, "--list-devices", environment=lowest)


STEPS = (
    Step(what="cmake, ninja and what its converter of models needs", do=_create_environment),
    Step(what="the source, out of llama-cpp-python's source distribution (77 MB)", do=_fetch_source),
    Step(what="compiling llama-server and its code for each level of CPU (minutes)", do=_build),
    Step(what="a first start of the server", do=_try_it),
)

if __name__ == "__main__":
    command_line(__doc__, LLAMA_CPP, STEPS)
