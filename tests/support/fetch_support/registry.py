"""Pushes of images and artifacts to a registry, as the tools that build them do."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from backports import zstd
from fetch_support.faulty_proxy import FaultyProxy

IMAGE_LAYER = "application/vnd.oci.image.layer.v1.tar"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass(frozen=True)
class Layer:
    data: bytes
    media_type: str
    annotations: Mapping[str, str]

    @property
    def digest(self) -> str:
        return digest(self.data)


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def archive(files: Mapping[str, bytes], *, compression: str = "", members: Sequence[tarfile.TarInfo] = ()) -> Layer:
    """Return a layer with these files, and members of other kinds before them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member in members:
            tar.addfile(member)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    compress = {"": bytes, "gzip": gzip.compress, "zstd": zstd.compress}[compression]
    suffix = f"+{compression}" if compression else ""
    return Layer(data=compress(out.getvalue()), media_type=f"{IMAGE_LAYER}{suffix}", annotations={})


def link(name: str, target: str, *, hard: bool = False) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = (tarfile.LNKTYPE if hard else tarfile.SYMTYPE), target
    return member


def titled(name: str, data: bytes) -> Layer:
    """Return one file as ORAS pushes it."""
    annotations = {"org.opencontainers.image.title": name}
    return Layer(data=data, media_type="application/octet-stream", annotations=annotations)


@dataclass(frozen=True)
class RegistryClient:
    server: str
    """The address for pushes."""
    host: str
    """The address for pulls, through the proxy."""
    proxy: FaultyProxy

    def push(self, repository: str, tag: str, *layers: Layer) -> str:
        """Push an image and return the digest of its manifest."""
        described = [self._describe(repository, layer) for layer in layers]
        config = self._describe(repository, Layer(data=b"{}", media_type=f"{MANIFEST}-config", annotations={}))
        body = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": described}
        return self.put_manifest(repository, tag, MANIFEST, body)

    def put_manifest(self, repository: str, tag: str, media_type: str, body: Mapping[str, Any]) -> str:
        text = json.dumps(body).encode()
        url = f"{self.server}/v2/{repository}/manifests/{tag}"
        httpx.put(url, content=text, headers={"Content-Type": media_type}).raise_for_status()
        return digest(text)

    def _describe(self, repository: str, layer: Layer) -> dict[str, Any]:
        begun = httpx.post(f"{self.server}/v2/{repository}/blobs/uploads/")
        begun.raise_for_status()
        url = httpx.URL(begun.headers["Location"])
        url = url.copy_merge_params({"digest": layer.digest})
        httpx.put(url, content=layer.data, headers={"Content-Type": "application/octet-stream"}).raise_for_status()
        described: dict[str, Any] = {
            "mediaType": layer.media_type,
            "digest": layer.digest,
            "size": len(layer.data),
        }
        return described | ({"annotations": dict(layer.annotations)} if layer.annotations else {})
