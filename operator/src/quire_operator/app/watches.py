"""The watches: kopf delivers events, and the handlers update the store and enqueue the key.

The handlers use ``@on.event`` alone, because kopf's other handlers write finalizers and annotations to the objects.
kopf would not retry an error in these handlers, and may run two of one key at once: ``workqueue`` handles both.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from quire_operator.admission import Review
from quire_operator.api import names
from quire_operator.app.settings import WebhookOptions
from quire_operator.app.telemetry import WatchHealth
from quire_operator.canary.manifests import WATCHED_KINDS
from quire_operator.deployment.store import Store
from quire_operator.kube.client import KubeClient
from quire_operator.kube.connection import Credentials
from quire_operator.kube.errors import ClusterError
from quire_operator.kube.objects import Key
from quire_operator.kube.trimming import key_of_child, trim_adapter, trim_child, trim_pod, trim_resource
from quire_operator.lora.controller import Adapters

logger = logging.getLogger(__name__)

_PODS = ("", "v1", "pods")
_LEASES = ("coordination.k8s.io", "v1", "leases")
_WATCH_SECONDS = 15
_SILENCE_SECONDS = 20.0
_CREDENTIALS_LAST = timedelta(minutes=5)
_PAGE = 200
WEBHOOK_PATHS = (names.PLURAL, names.ADAPTER_PLURAL)
_CERTIFICATE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbox:
    store: Store
    adapters: Adapters
    namespaces: frozenset[str]
    """The namespaces to act in; empty means all."""
    enqueue: Callable[[Key], None]
    relisted: Callable[[], None]
    """Called when a watch was restarted with a new list: deletions in between were not delivered."""
    lease_seen: Callable[[str, datetime | None], None]
    """Called with the Lease's holder and its time of renewal."""

    def takes(self, key: Key) -> bool:
        return not self.namespaces or key.namespace in self.namespaces


Login = Callable[[], Awaitable[Credentials]]
Judge = Callable[[Mapping[str, Any], Mapping[str, Any] | None], Awaitable[Review]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """The validating webhook, with the functions that review an object of each kind."""

    options: WebhookOptions
    judge: Judge
    judge_adapter: Judge


async def watch(
    inbox: Inbox,
    login: Login,
    *,
    namespace: str,
    lease_name: str,
    started: Callable[[], None],
    webhook: Webhook | None = None,
) -> BaseException | None:
    """Deliver events until kopf ends, for example because the CRD was deleted; return the reason.

    ``namespace`` is the namespace of the Lease.
    """
    asked, settings = registry(inbox, login), operator_settings(namespace=namespace, lease_name=lease_name)
    if webhook is not None:
        _serve_reviews(asked, settings, webhook)
    tasks = await kopf.spawn_tasks(
        registry=asked,
        settings=settings,
        clusterwide=not inbox.namespaces,
        namespaces=sorted({*inbox.namespaces, namespace}) if inbox.namespaces else (),
    )
    started()
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next((task.exception() for task in done if not task.cancelled()), None)
    finally:
        left: set[asyncio.Future[None]] = set(tasks)
        while left:  # kopf's wait can lose a cancellation, so one may not be enough
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=2.0)


def registry(inbox: Inbox, login: Login) -> kopf.OperatorRegistry:
    """Return all handlers that kopf calls."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        return _connection_info(await login())

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def on_resource(event: Mapping[str, Any], **_: Any) -> None:
        resource = trim_resource(event["object"])
        if not inbox.takes(resource.key):
            return
        if event["type"] == "DELETED":
            inbox.store.drop_resource(resource.key, resource.uid)
            inbox.enqueue(resource.key)
        elif inbox.store.put_resource(resource):
            inbox.enqueue(resource.key)
        _note_listing(inbox, event)

    kopf.on.event(names.GROUP, names.VERSION, names.ADAPTER_PLURAL, registry=registry)(_adapter_handler(inbox))
    for kind, selector in WATCHED_KINDS.items():
        kopf.on.event(*selector, registry=registry, id=f"on_{kind.lower()}")(_child_handler(inbox, kind))

    @kopf.on.event(*_PODS, registry=registry)
    async def on_pod(event: Mapping[str, Any], **_: Any) -> None:
        pod, key = trim_pod(event["object"]), key_of_child(event["object"])
        if key is None or not inbox.takes(key):
            return
        if event["type"] == "DELETED":
            inbox.store.drop_pod(key, pod.name, pod.uid)
            inbox.enqueue(key)
        elif inbox.store.put_pod(key, pod):
            inbox.enqueue(key)
        _note_listing(inbox, event)

    @kopf.on.event(*_LEASES, registry=registry)
    async def on_lease(event: Mapping[str, Any], **_: Any) -> None:
        spec = event["object"].get("spec") or {}
        renewed = spec.get("renewTime")
        holder = "" if event["type"] == "DELETED" else spec.get("holderIdentity") or ""
        inbox.lease_seen(holder, None if renewed is None else datetime.fromisoformat(renewed))

    return registry


def _adapter_handler(inbox: Inbox) -> Callable[..., Awaitable[None]]:
    async def on_adapter(event: Mapping[str, Any], **_: Any) -> None:
        adapter = trim_adapter(event["object"])
        if not inbox.takes(adapter.key):
            return
        if event["type"] == "DELETED":
            inbox.adapters.drop(adapter.key, adapter.uid)
        else:
            inbox.adapters.put(adapter)
        _note_listing(inbox, event)

    return on_adapter


def _child_handler(inbox: Inbox, kind: str) -> Callable[..., Awaitable[None]]:
    async def on_child(event: Mapping[str, Any], **_: Any) -> None:
        child, key = trim_child(event["object"], kind=kind), key_of_child(event["object"])
        if key is None or not inbox.takes(key):
            return
        if event["type"] == "DELETED":
            inbox.store.drop_child(key, child.ref, child.uid)
            inbox.enqueue(key)
        elif inbox.store.put_child(key, child):
            inbox.enqueue(key)
        _note_listing(inbox, event)

    return on_child


def _serve_reviews(registry: kopf.OperatorRegistry, settings: kopf.OperatorSettings, webhook: Webhook) -> None:
    """Let kopf serve reviews. It reloads its certificate when the file changes."""
    settings.admission.server = lambda call: reviews_server(webhook, call)
    logging.getLogger("kopf.objects").addFilter(_is_no_refusal)

    for path, judge in zip(WEBHOOK_PATHS, (webhook.judge, webhook.judge_adapter), strict=True):
        kopf.on.validate(names.GROUP, names.VERSION, path, registry=registry, id=path)(_review_handler(judge))


def _review_handler(judge: Judge) -> Callable[..., Awaitable[None]]:
    async def on_review(*, body: kopf.Body, warnings: list[str], **rest: Any) -> None:
        if rest["operation"] not in ("CREATE", "UPDATE"):
            return
        review = await judge(body, rest["old"])
        warnings.extend(review.warnings)
        if review.problems:
            raise kopf.AdmissionError(review.message, code=422)

    return on_review


async def reviews_server(
    webhook: Webhook, call: kopf.WebhookFn, *, check_seconds: float = _CERTIFICATE_SECONDS
) -> AsyncIterator[kopf.WebhookClientConfig]:
    """Yield from kopf's webhook server and restart it when it fails.

    Without the restart, one invalid renewal of the certificate would also end all watches.
    """
    options = webhook.options
    while True:
        server = kopf.WebhookServer(
            addr=options.host,
            port=options.port,
            certfile=options.certificate,
            pkeyfile=options.key,
            verify_mode=None if options.client_ca is None else ssl.CERT_REQUIRED,
            verify_cafile=options.client_ca,
            file_check_interval=check_seconds,
        )
        try:
            async for configuration in server(call):
                yield configuration
        except OSError as error:  # ssl.SSLError is an OSError
            logger.error("the webhook cannot start; check its certificate, key and port: %s", error)
        await asyncio.sleep(check_seconds)


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """Return False for kopf's error log about a rejected object: the client gets the rejection as its answer."""
    return not record.getMessage().startswith(tuple(f"Webhook '{path}' failed permanently" for path in WEBHOOK_PATHS))


def _note_listing(inbox: Inbox, event: Mapping[str, Any]) -> None:
    if event["type"] is None:
        inbox.relisted()


class _Backoffs:
    """The delays between attempts of a request: at most 5 s and without an end.

    A watch must outlive its API server.
    """

    def __iter__(self) -> Iterator[float]:
        yield from (0.2, 0.5, 1.0, 2.0)
        while True:
            yield 5.0


class _NoEssence(kopf.DiffBaseStorage):
    """A storage that keeps nothing: quire needs no diffs, and kopf's copies took a sixth of the operator's CPU time."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None: ...


class _NoProgress(kopf.ProgressStorage):
    """A storage that keeps nothing, because event handlers have no progress."""

    def fetch(self, *, key: str, body: kopf.Body) -> None:
        return None

    def store(self, *, key: str, record: Any, body: kopf.Body, patch: kopf.Patch) -> None: ...
    def purge(self, *, key: str, body: kopf.Body, patch: kopf.Patch) -> None: ...
    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None: ...

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


def operator_settings(*, namespace: str, lease_name: str) -> kopf.OperatorSettings:
    """Return kopf's settings for delivering events only. ``namespace`` is the namespace of the Lease."""
    settings = kopf.OperatorSettings()
    watching = settings.watching
    for selector in (*WATCHED_KINDS.values(), _PODS):
        watching.label_selectors[selector] = names.LABEL_DEPLOYMENT
    watching.field_selectors[_LEASES] = f"metadata.name={lease_name},metadata.namespace={namespace}"
    watching.server_timeout = _WATCH_SECONDS
    watching.inactivity_timeout = _SILENCE_SECONDS
    watching.connect_timeout = 5.0
    watching.chunk_size = _PAGE
    # With scanning on, kopf can miss a CRD that was deleted and created again; ``app`` waits for it and watches again.
    settings.scanning.disabled = True
    settings.networking.error_backoffs = _Backoffs()
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.persistence.diffbase_storage = _NoEssence()
    settings.persistence.progress_storage = _NoProgress()
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.peering.standalone = True
    settings.queueing.idle_timeout = 1.0
    return settings


def _connection_info(credentials: Credentials) -> kopf.ConnectionInfo:
    return kopf.ConnectionInfo(
        server=credentials.server,
        ca_path=credentials.ca_path,
        insecure=not credentials.verify,
        certificate_path=credentials.certificate_path,
        private_key_path=credentials.private_key_path,
        token=credentials.token,
        # A token from a file or a plugin lives for minutes, so it is read again before it can expire.
        expiration=None if credentials.token is None else datetime.now(UTC) + _CREDENTIALS_LAST,
    )


_RETRY_SECONDS = 2.0


class Watching:
    """The watches and their health. ``running`` is set while they deliver events."""

    def __init__(
        self, *, inbox: Inbox, kube: KubeClient, namespace: str, lease_name: str, started: Callable[[], None]
    ) -> None:
        """``namespace`` is the namespace of the Lease; ``started`` is called whenever the watches have started."""
        self._inbox, self._kube, self._namespace, self._lease_name = inbox, kube, namespace, lease_name
        self._started = started
        self.running = asyncio.Event()
        self.health = WatchHealth(started=time.monotonic())

    async def run(self, login: Login, webhook: Webhook | None) -> None:
        """Watch, and start again whenever the watches end, for example after the CRD was deleted and created again."""
        while True:
            await self._wait_for_crd()
            reason = await watch(
                self._inbox,
                login,
                namespace=self._namespace,
                lease_name=self._lease_name,
                started=self._note_start,
                webhook=webhook,
            )
            self.running.clear()
            logger.warning("watches ended, restarting: %r", reason)
            await asyncio.sleep(_RETRY_SECONDS)

    def problem(self) -> str | None:
        """Return why the watches count as broken, or None; without the CRD there is nothing to watch."""
        return self.health.problem() if self.running.is_set() else None

    def lag(self) -> float:
        """Return for how many seconds the watches have shown nothing of what our calls saw."""
        return self.health.lag() if self.running.is_set() else 0.0

    def _note_start(self) -> None:
        self._started()
        self.health = WatchHealth(started=time.monotonic())
        self.running.set()

    async def _wait_for_crd(self) -> None:
        reported = None
        while True:
            try:
                if await self._kube.is_established():
                    return
                problem = "there is no LLMDeployment kind in this cluster yet: waiting for its CRD"
            except ClusterError as error:
                problem = f"waiting for the API server: {error}"
            if problem != reported:
                logger.warning("%s", problem)
                reported = problem
            await asyncio.sleep(_RETRY_SECONDS)
