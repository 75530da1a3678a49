"""The sandbox image of pods: one static program in an OCI archive. This module only reads the program."""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = "localhost/quire-pause"


def host_architecture() -> str:
    """Return the architecture as images name it."""
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def image_name(program: Path) -> str:
    """Return the image name, which contains a hash of its content."""
    return f"{REPOSITORY}:{hashlib.sha256(program.read_bytes()).hexdigest()[:12]}"


def archive(program: Path, *, architecture: str) -> bytes:
    """Return the archive for `ctr images import`."""
    layer = _tar({"pause": (program.read_bytes(), 0o755)})
    config = _json(
        {
            "architecture": architecture,
            "os": "linux",
            "config": {"Entrypoint": ["/pause"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
        }
    )
    named = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest) | {
        "annotations": {"io.containerd.image.name": image_name(program)}
    }
    blobs = {f"blobs/sha256/{_digest(blob).partition(':')[2]}": (blob, 0o644) for blob in (layer, config, manifest)}
    index = _json({"schemaVersion": 2, "manifests": [named]})
    return _tar({"oci-layout": (_json({"imageLayoutVersion": "1.0.0"}), 0o644), "index.json": (index, 0o644)} | blobs)


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    """Return a reproducible tar archive without times and owners."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, (content, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
