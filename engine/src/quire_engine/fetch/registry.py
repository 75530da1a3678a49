"""A client for OCI registries: an image's manifest, checked by digest, and requests for its blobs.

For ``image``. It follows the OCI distribution specification and the token protocol of its reference implementation.
Registries on this machine are accessed by plain HTTP, all others by HTTPS.
"""

import hashlib
import json
import os
import platform
import re
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import httpx

from quire_common.model_source import ImageSource
from quire_engine import __version__
from quire_engine.errors import FetchError
from quire_engine.fetch.registry_logins import Login, find_login
from quire_engine.fetch.remote_files import Answer, Unreachable, first_line

_TIMEOUT_SECONDS = 20.0
_MAX_ANSWER_BYTES = 8 << 20
"""The limit for a manifest, a token or an error; the registries' own limit is 4 MiB."""
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_ACCEPT = {"Accept": ", ".join((*_MANIFESTS, *_INDEXES))}
_ARCHITECTURES = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64"}
_TOKEN_SECONDS = 60.0
"""The lifetime of a token that does not state one."""
_CREDENTIALS = (
    "locally run `docker login`; on a cluster let spec.model.credentials.secretName name a secret of the type "
    "kubernetes.io/dockerconfigjson"
)
_ERROR_CODES = frozenset(
    {"BLOB_UNKNOWN", "MANIFEST_UNKNOWN", "NAME_UNKNOWN", "NAME_INVALID", "DENIED", "UNAUTHORIZED", "TOOMANYREQUESTS"}
)
"""The codes of the specification that answer a download."""
_REPEATED = frozenset({429, 500, 502, 503, 504})
_ATTEMPTS, _FIRST_WAIT_SECONDS = 4, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    digest: str
    size_bytes: int
    media_type: str
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    digest: str
    layers: tuple[Blob, ...]


class Registry:
    """One repository of a registry, for one image."""

    def __init__(self, source: ImageSource) -> None:
        self._source = source
        host = "registry-1.docker.io" if source.registry == "docker.io" else source.registry
        repository = source.repository
        if source.registry == "docker.io" and "/" not in repository:
            repository = f"library/{repository}"
        scheme = "http" if re.fullmatch(r"(localhost|127\.[0-9.]+)(:[0-9]+)?", host) else "https"
        self._repository, self._base = repository, f"{scheme}://{host}/v2/{repository}"
        self._login: Login | None = find_login(source.registry, os.environ)
        self._authorization: str | None = None
        self._valid_until = float("inf")

    def manifest(self) -> Manifest:
        """Return the image's manifest; of several, the one for this machine's platform."""
        with self._client() as client:
            digest, body = self._read_manifest(client, self._source.reference)
            if body.get("mediaType") in _INDEXES or "manifests" in body:
                digest, body = self._read_manifest(client, self._choose(body))
        layers = body.get("layers")
        if not isinstance(layers, list) or not layers:
            raise FetchError(
                f"{self._source.image} has no layers", hint="it is not an image or artifact; check the reference"
            )
        try:
            return Manifest(digest=digest, layers=tuple(_blob(layer) for layer in layers))
        except (KeyError, TypeError, ValueError) as error:
            raise FetchError(f"the manifest of {self._source.image} is invalid: {error}") from error

    def blob_url(self, digest: str) -> str:
        return f"{self._base}/blobs/{digest}"

    def headers(self) -> dict[str, str]:
        """Return the headers for a blob request, with a token that remains valid for a while."""
        if self._authorization is None or time.monotonic() > self._valid_until:
            with self._client() as client:
                self._ask(client, "HEAD", f"{self._base}/manifests/{self._source.reference}", _ACCEPT)
        return {"Authorization": self._authorization} if self._authorization else {}

    def forget_token(self) -> None:
        """Forget the token after it was refused."""
        self._authorization = None

    def read(self, digest: str, start: int, size: int) -> bytes:
        """Return ``size`` bytes of a blob from ``start``, or fewer at its end."""
        headers = {"Range": f"bytes={start}-{start + size - 1}", "Accept-Encoding": "identity"}
        read = b""
        with self._client() as client, self._explained():
            headers |= self.headers()
            with client.stream("GET", self.blob_url(digest), headers=headers) as response:
                if response.status_code not in (200, 206):
                    raise self.refusal(self._capped(response))
                skip = start if response.status_code == 200 else 0
                for piece in response.iter_raw(1 << 16):
                    read += piece
                    if len(read) >= skip + size:
                        break
        return read[skip : skip + size]

    def refusal(self, answer: Answer) -> FetchError:
        image, registry = self._source.image, self._source.registry
        said = _said(answer.body, whole=self._login is not None)
        if answer.status in (401, 403):
            if self._login is None:
                return FetchError(f"{registry} does not allow anonymous access to {image}{said}", hint=_CREDENTIALS)
            return FetchError(
                f"{registry} does not allow {_whom(self._login)} to read {image}{said}", hint=_CREDENTIALS
            )
        if answer.status == 404:
            return FetchError(f"{registry} has no {image}{said}", hint="check name and tag; it may also be private")
        return FetchError(f"{registry} refused {image}: HTTP {answer.status}{said}")

    def unreachable(self, error: BaseException) -> Unreachable:
        return Unreachable(
            f"{self._source.registry} cannot be reached for {self._source.image}: {first_line(error)}",
            hint="check the network and the registry's name, then run again; what was downloaded is kept and continued",
        )

    def _client(self) -> httpx.Client:
        return httpx.Client(
            headers={"User-Agent": f"quire/{__version__}"}, timeout=_TIMEOUT_SECONDS, follow_redirects=True
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise self.unreachable(error) from error

    def _read_manifest(self, client: httpx.Client, reference: str) -> tuple[str, Mapping[str, Any]]:
        answer = self._ask(client, "GET", f"{self._base}/manifests/{reference}", _ACCEPT)
        digest = f"sha256:{hashlib.sha256(answer.body).hexdigest()}"
        if reference.startswith("sha256:") and digest != reference:
            raise FetchError(f"{self._source.registry} answered {reference} with another manifest, {digest}")
        try:
            body = json.loads(answer.body)
        except (ValueError, RecursionError) as error:
            raise FetchError(f"the manifest of {self._source.image} is not JSON: {first_line(error)}") from error
        if not isinstance(body, Mapping):
            raise FetchError(f"the manifest of {self._source.image} is not a JSON object")
        return digest, body

    def _choose(self, index: Mapping[str, Any]) -> str:
        """Return the digest of the manifest for this machine; an artifact with one manifest is for all machines."""
        entries = [entry for entry in index.get("manifests") or () if isinstance(entry, Mapping)]
        images = [e for e in entries if "vnd.docker.reference.type" not in (e.get("annotations") or {})]
        here = ("linux", _ARCHITECTURES.get(platform.machine(), platform.machine()))
        fitting = [e for e in images if _platform(e) == here] or (images if len(images) == 1 else [])
        if not fitting or not isinstance(fitting[0].get("digest"), str):
            there = ", ".join("/".join(_platform(entry)) for entry in images) or "none"
            raise FetchError(f"{self._source.image} has no image for {'/'.join(here)}", hint=f"there are: {there}")
        return str(fitting[0]["digest"])

    def _ask(self, client: httpx.Client, method: str, url: str, headers: Mapping[str, str]) -> Answer:
        """Send a request, with a token if the registry requires one. Raise FetchError for all answers but success."""
        with self._explained():
            answer = self._send(client, method, url, headers)
            if answer.status == 401 and (challenge := answer.headers.get("WWW-Authenticate")):
                self._authorize(client, challenge)
                answer = self._send(client, method, url, headers)
        if answer.status in _REPEATED:
            raise Unreachable(f"{self._source.registry} does not serve {self._source.image}: HTTP {answer.status}")
        if answer.status != 200:
            raise self.refusal(answer)
        return answer

    def _send(self, client: httpx.Client, method: str, url: str, headers: Mapping[str, str]) -> Answer:
        authorization = {"Authorization": self._authorization} if self._authorization else {}
        for attempt in range(_ATTEMPTS):
            with client.stream(method, url, headers={**headers, **authorization}) as response:
                answer = self._capped(response)
            if answer.status not in _REPEATED or attempt == _ATTEMPTS - 1:
                break
            time.sleep(_FIRST_WAIT_SECONDS * 2**attempt)
        return answer

    def _capped(self, response: httpx.Response) -> Answer:
        """Return the answer with its body, which only for blobs may exceed the limit."""
        body = bytearray()
        for piece in response.iter_bytes():
            body += piece
            if len(body) > _MAX_ANSWER_BYTES:
                raise FetchError(
                    f"{self._source.registry} answers with more than {_MAX_ANSWER_BYTES >> 20} MiB where it should"
                    f" describe {self._source.image}"
                )
        return Answer(status=response.status_code, body=bytes(body), headers=response.headers)

    def _authorize(self, client: httpx.Client, challenge: str) -> None:
        scheme, _, rest = challenge.partition(" ")
        parameters = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        login = self._login
        if scheme.lower() == "basic" and login is not None and not login.is_identity_token:
            self._authorization = f"Basic {b64encode(f'{login.user}:{login.password}'.encode()).decode()}"
            return
        if scheme.lower() != "bearer" or "realm" not in parameters:
            return  # The registry's next answer explains the problem.
        scope = parameters.get("scope") or f"repository:{self._repository}:pull"
        wanted = {"service": parameters.get("service", ""), "scope": scope}
        realm = parameters["realm"]
        if self._base.startswith("https://") and not realm.startswith("https://"):
            raise FetchError(
                f"{self._source.registry} requests credentials for {realm[:200]}, which is not HTTPS",
                hint="none were sent; contact the operator of the registry",
            )
        if login is not None and login.is_identity_token:
            form = {"grant_type": "refresh_token", "refresh_token": login.password, "client_id": "quire", **wanted}
            # A redirect would forward the token in the form.
            asked = client.stream("POST", realm, data=form, follow_redirects=False)
        else:
            auth = None if login is None else (login.user, login.password)
            asked = client.stream("GET", f"{realm}?{urlencode(wanted)}", auth=auth)
        with asked as response:
            answer = self._capped(response)
        if answer.status != 200:
            raise self.refusal(answer)
        self._keep_token(answer)

    def _keep_token(self, answer: Answer) -> None:
        try:
            body = json.loads(answer.body)
            token = body.get("token") or body["access_token"]
            seconds = float(body.get("expires_in") or _TOKEN_SECONDS)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FetchError(f"the token service of {self._source.registry} answered without a token") from error
        self._authorization = f"Bearer {token}"
        self._valid_until = time.monotonic() + 0.7 * seconds


def _blob(layer: Mapping[str, Any]) -> Blob:
    digest = layer["digest"]
    if not isinstance(digest, str) or re.fullmatch(r"sha256:[0-9a-f]{64}", digest) is None:
        raise ValueError(f"a layer's digest is {digest!r}; only sha256 is known")
    return Blob(
        digest=digest,
        size_bytes=int(layer["size"]),
        media_type=str(layer.get("mediaType", "")),
        annotations={str(name): str(value) for name, value in (layer.get("annotations") or {}).items()},
    )


def _platform(entry: Mapping[str, Any]) -> tuple[str, str]:
    found = entry.get("platform") or {}
    return str(found.get("os", "unknown")), str(found.get("architecture", "unknown"))


def _whom(login: Login) -> str:
    return login.user or "the holder of this token"


def _said(body: bytes, *, whole: bool) -> str:
    """Return the registry's own error in the format of the specification: the code, or also the message if ``whole``.

    A registry without a login may be any server that the author of an adapter chose, so its texts are not repeated.
    """
    try:
        errors: Sequence[Mapping[str, Any]] = json.loads(body)["errors"]
        code, message = str(errors[0]["code"]), errors[0].get("message", "")
        if not whole:
            return f" ({code})" if code in _ERROR_CODES else ""
        return f" ({code}: {message})"[:300]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return ""
