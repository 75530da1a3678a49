"""Discovery in a cluster: LLMDeployments, LLMAdapters and EndpointSlices, listed once and then watched.

The API server is reached from inside a pod, or by a kubeconfig.
"""

import asyncio
import base64
import logging
import os
import random
import ssl
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

import aiohttp
import msgspec
import yaml

from quire_common.contract.kubernetes import ADAPTER_PLURAL, API_VERSION, LABEL_DEPLOYMENT, PLURAL
from quire_common.errors import ConfigurationError
from quire_common.names import url_host
from quire_common.served_names import Claim, NameScope, held_by
from quire_gateway.endpoints import Publish, Snapshot
from quire_gateway.endpoints.kubernetes_objects import (
    SERVICE_NAME,
    KubeList,
    KubeObject,
    KubeSlice,
    KubeStatus,
    ObjectKey,
    WatchEvent,
    count_gateways,
    key_in,
    read_adapter,
    read_model,
    read_slice,
    snapshot_of,
)

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The address of the API server and the credentials for it."""

    url: str
    tls: ssl.SSLContext | None
    """None for plain http."""
    token: str | None = None
    token_file: Path | None = None
    """Read again for every request, because the kubelet renews it."""

    def headers(self) -> dict[str, str]:
        token = self.token_file.read_text().strip() if self.token_file is not None else self.token
        return {"Authorization": f"Bearer {token}"} if token else {}

    def session(self) -> aiohttp.ClientSession:
        """Return a session to the API server, which the caller closes."""
        connector = aiohttp.TCPConnector(ssl=True if self.tls is None else self.tls)
        return aiohttp.ClientSession(connector=connector, trust_env=False)


def access_of(kubeconfig: Path | None) -> Access:
    return in_cluster(os.environ, _SERVICE_ACCOUNT) if kubeconfig is None else from_kubeconfig(kubeconfig)


def in_cluster(environ: Mapping[str, str], folder: Path) -> Access:
    """Return the access of a pod with a service account."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port or not (folder / "token").is_file():
        raise ConfigurationError(
            "--kubernetes: this is not a pod with a service account "
            f"(no KUBERNETES_SERVICE_HOST, or no token in {folder}); outside a cluster add --kubeconfig FILE"
        )
    try:
        tls = ssl.create_default_context(cafile=folder / "ca.crt")
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"--kubernetes: {folder / 'ca.crt'} cannot be read: {error}") from error
    return Access(url=f"https://{url_host(host)}:{port}", tls=tls, token_file=folder / "token")


def from_kubeconfig(path: Path) -> Access:
    """Return the access of a kubeconfig's current context."""
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--kubeconfig: {path} cannot be read: {error}") from error
    try:
        return _current_context(document, path.parent)
    except _Incomplete as error:
        raise ConfigurationError(f"--kubeconfig: {path}: {error}") from error
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigurationError(f"--kubeconfig: {path}: its certificates cannot be read: {error}") from error


class _Incomplete(Exception):
    """A kubeconfig that lacks something."""


def _current_context(document: object, folder: Path) -> Access:
    root = _mapping(document, "the file")
    context = _named(root, "contexts", root.get("current-context"), "context")
    cluster = _named(root, "clusters", context.get("cluster"), "cluster")
    user = _named(root, "users", context.get("user"), "user")
    if "exec" in user or "auth-provider" in user:
        raise _Incomplete(
            "its user gets credentials from a command (exec or auth-provider); the gateway supports tokens and "
            "client certificates only: use the token of a service account"
        )
    url = str(cluster.get("server", "")).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise _Incomplete(f"cluster {context.get('cluster')!r} has no server address")
    token_file = user.get("tokenFile")
    return Access(
        url=url,
        tls=_tls(cluster, user, folder) if url.startswith("https://") else None,
        token=None if user.get("token") is None else str(user["token"]),
        token_file=None if token_file is None else folder / str(token_file),
    )


def _tls(cluster: Mapping[str, object], user: Mapping[str, object], folder: Path) -> ssl.SSLContext:
    authority = _pem(cluster, "certificate-authority", folder)
    tls = ssl.create_default_context(cadata=None if authority is None else authority.decode())
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    certificate, key = _pem(user, "client-certificate", folder), _pem(user, "client-key", folder)
    if certificate is not None and key is not None:
        # The ssl module reads a client certificate from files only.
        with tempfile.TemporaryDirectory() as private:
            pair = Path(private) / "pair.pem"
            pair.touch(mode=0o600)
            pair.write_bytes(certificate + b"\n" + key)
            tls.load_cert_chain(pair)
    return tls


def _pem(section: Mapping[str, object], key: str, folder: Path) -> bytes | None:
    """Return a certificate or key, which is in the kubeconfig itself or in a file next to it."""
    data, file = section.get(f"{key}-data"), section.get(key)
    if data is not None:
        return base64.b64decode(str(data), validate=True)
    return None if file is None else (folder / str(file)).read_bytes()


def _named(root: Mapping[str, object], group: str, name: object, kind: str) -> Mapping[str, object]:
    entries = root.get(group)
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("name") == name and name is not None:
            return _mapping(entry.get(kind), f"{kind} {name!r}")
    raise _Incomplete(f"there is no {kind} {name!r}" if name else f"no {kind} is selected")


def _mapping(value: object, what: str) -> Mapping[str, object]:
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    raise _Incomplete(f"{what} is not a mapping")


_WATCH_SECONDS = 15
_SILENCE_SECONDS = 20.0
"""A watch that is silent for longer, without even ending, has lost its connection."""
_LIST_TIMEOUT = aiohttp.ClientTimeout(total=15.0)
_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=_SILENCE_SECONDS)
_MAX_LINE_BYTES = 4 * 2**20
_PAGE = 500
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0
_STABLE_SECONDS = 1.0
_NOT_ALLOWED_SECONDS = 5.0
"""An API server that has just started answers every client with 403 for a moment; after this time it is real."""
_SETTLE_SECONDS = 0.02

_Kept = TypeVar("_Kept")

_log = logging.getLogger(__name__)


class _Expired(Exception):
    """A watch whose resource version the API server no longer has: the objects must be listed again."""


class _Refused(Exception):
    """An answer of the API server other than the requested one."""


class _NotAllowed(_Refused):
    """A missing permission: it was never granted, or it vanished with its namespace."""


class _NoSuchKind(_NotAllowed):
    """A kind that the API server does not have: no CRD is installed, so there are no objects."""


@dataclass(slots=True)
class _Store(Generic[_Kept]):
    """The objects and the state of one watch."""

    path: str
    read: Callable[[msgspec.Raw], _Kept | None]
    """Returns what is kept of an object; None if nothing is."""
    selector: str = ""
    objects: dict[ObjectKey, _Kept] = field(default_factory=dict)
    version: str | None = None
    """The version at which the watch continues; None: list first."""
    is_synced: bool = False
    not_allowed_since: float | None = None
    is_given_up: bool = False
    """True if it was forbidden for so long that the other watches no longer wait for it."""

    def keep(self, item: msgspec.Raw) -> bool:
        """Keep what is needed of an object, and return whether that changed."""
        key, kept = key_in(item), self.read(item)
        before = self.objects.pop(key, None)
        if kept is not None:
            self.objects[key] = kept
        return kept != before

    def note_not_allowed(self, now: float) -> bool:
        """Record that the watch is forbidden; return whether it is given up now."""
        since = self.not_allowed_since = now if self.not_allowed_since is None else self.not_allowed_since
        before, self.is_given_up = self.is_given_up, now - since >= _NOT_ALLOWED_SECONDS
        return self.is_given_up and not before


class KubernetesDiscovery:
    """Discovery by three watches per namespace, or three for all namespaces."""

    def __init__(
        self,
        access: Access,
        session: aiohttp.ClientSession,
        *,
        namespaces: tuple[str, ...] = (),
        scope: NameScope = NameScope.CLUSTER,
        gateway_service: tuple[str, str] | None = None,
    ) -> None:
        self._access, self._session, self._scope = access, session, scope
        places = [f"namespaces/{namespace}/" for namespace in namespaces] or [""]
        self._models = [_Store(f"/apis/{API_VERSION}/{place}{PLURAL}", read_model) for place in places]
        self._adapters = [_Store(f"/apis/{API_VERSION}/{place}{ADAPTER_PLURAL}", read_adapter) for place in places]
        self._slices = [
            _Store(f"/apis/discovery.k8s.io/v1/{place}endpointslices", read_slice, LABEL_DEPLOYMENT) for place in places
        ]
        self._gateways = _gateway_stores(gateway_service)
        self._changed = asyncio.Event()
        self._logged: set[tuple[str, str, str]] = set()

    async def run(self, publish: Publish) -> None:
        """See ``Discovery``."""
        async with asyncio.TaskGroup() as group:
            for models in self._models:
                group.create_task(self._follow(models))
            for adapters in self._adapters:
                group.create_task(self._follow(adapters))
            for slices in (*self._slices, *self._gateways):
                group.create_task(self._follow(slices))
            while True:
                await self._changed.wait()
                # A rollout's events come in bursts.
                await asyncio.sleep(_SETTLE_SECONDS)
                self._changed.clear()
                # A gateway that does not know how many there are would allow each tenant too much.
                gateways_known = not self._gateways or _is_known(self._gateways)
                # An operator or a role of an older version does not know adapters, which hides no model.
                adapters_known = all(store.is_synced or store.is_given_up for store in self._adapters)
                if _is_known(self._models) and _is_known(self._slices) and adapters_known and gateways_known:
                    publish(self._snapshot())

    @property
    def num_gateways(self) -> int:
        """See ``Discovery``."""
        return max(1, count_gateways(item for store in self._gateways for item in store.objects.values()))

    def _snapshot(self) -> Snapshot:
        known = [model for store in self._models for model in store.objects.values()]
        adapters = [claim for store in self._adapters for claim in store.objects.values()]
        self._log_conflicts([*(model.claim for model in known), *adapters])
        slices = [item for store in self._slices for item in store.objects.values()]
        return snapshot_of(known, slices, self._scope, adapters)

    def _log_conflicts(self, claims: Iterable[Claim]) -> None:
        """Log each conflict once, not at every change."""
        held = held_by(claims, self._scope).items()
        conflicts = {
            (claim.claimant_text, model, first.claimant_text) for model, (first, *rest) in held for claim in rest
        }
        for claimant, model, owner in sorted(conflicts - self._logged):
            _log.warning(
                "served name conflict: %s claims %r, which %s serves; it gets no requests", claimant, model, owner
            )
        self._logged = conflicts

    async def _follow(self, store: _Store[_Kept]) -> None:
        """List and watch until cancelled; errors are logged and retried."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            started = monotonic()
            try:
                if store.version is None:
                    await self._list(store)
                await self._watch(store)
            except _Expired:
                store.version = None
            except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, _Refused) as error:
                if isinstance(error, _NotAllowed) and store.note_not_allowed(monotonic()):
                    if isinstance(error, _NoSuchKind):
                        store.objects, store.is_synced = {}, True
                    self._changed.set()
                reason = error or type(error).__name__
                _log.warning("watch failed, keeping the last known endpoints: %s: %s", store.path, reason)
            except Exception:
                # A bug here must not stop requests, which need only the endpoints that are known.
                _log.exception("unexpected watch error, keeping the last known endpoints: %s", store.path)
            if monotonic() - started >= _STABLE_SECONDS:
                # The watch worked for a while: continue at once, because events may be waiting.
                pause = _FIRST_PAUSE_SECONDS
                continue
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(_LONGEST_PAUSE_SECONDS, pause * 2)

    async def _list(self, store: _Store[_Kept]) -> None:
        objects: dict[ObjectKey, _Kept] = {}
        params = {"labelSelector": store.selector, "limit": str(_PAGE)}
        while True:
            async with self._get(store.path, params, _LIST_TIMEOUT) as response:
                await _check(response)
                page = msgspec.json.decode(await response.read(), type=KubeList)
            objects |= {key_in(item): kept for item in page.items if (kept := store.read(item)) is not None}
            if not page.metadata.continue_:
                break
            params["continue"] = page.metadata.continue_
        store.objects, store.version, store.is_synced = objects, page.metadata.resource_version, True
        store.not_allowed_since, store.is_given_up = None, False
        self._changed.set()

    async def _watch(self, store: _Store[_Kept]) -> None:
        """Watch until the server ends it, soon and on request, because a short watch cannot hide a dead connection."""
        params = {
            "labelSelector": store.selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": store.version or "",
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        async with self._get(store.path, params, _WATCH_TIMEOUT) as response:
            await _check(response)
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _MAX_LINE_BYTES:
                    raise _Refused(f"an event has more than {_MAX_LINE_BYTES} bytes")
                for line in lines:
                    self._apply(store, msgspec.json.decode(line, type=WatchEvent))

    def _apply(self, store: _Store[_Kept], event: WatchEvent) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=KubeStatus)
            if status.code == 410:
                raise _Expired
            raise _Refused(f"{status.code} {status.message}")
        store.version = msgspec.json.decode(event.object, type=KubeObject).metadata.resource_version
        if event.type == "BOOKMARK":
            return
        if event.type == "DELETED":
            changed = store.objects.pop(key_in(event.object), None) is not None
        else:
            changed = store.keep(event.object)
        if changed:
            self._changed.set()

    def _get(
        self, path: str, params: Mapping[str, str], timeout: aiohttp.ClientTimeout
    ) -> "aiohttp.client._RequestContextManager":
        return self._session.get(
            f"{self._access.url}{path}", params=params, headers=self._access.headers(), timeout=timeout
        )


def _gateway_stores(service: tuple[str, str] | None) -> list[_Store[KubeSlice]]:
    if service is None:
        return []
    namespace, name = service
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    return [_Store(path, read_slice, f"{SERVICE_NAME}={name}")]


def _is_known(stores: Iterable[_Store[_Kept]]) -> bool:
    """Return whether every permitted watch is synced: one missing namespace must not hide the models of the others."""
    watched = list(stores)
    return any(store.is_synced for store in watched) and all(store.is_synced or store.is_given_up for store in watched)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 410:
        raise _Expired
    if response.status != 200:
        kind = {403: _NotAllowed, 404: _NoSuchKind}.get(response.status, _Refused)
        raise kind(f"the API server answered {response.status}: {(await response.text())[:200]}")
