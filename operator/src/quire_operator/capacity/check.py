"""The capacity check with its inputs from the hub and the cluster; ``deployment.controller`` and ``admission`` call it.

It requests the answers of hub and cluster in its own tasks, so that they never delay a pass for long. Unknown facts
never block a spec.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from quire_common.model_memory import ModelFacts
from quire_operator.api import HubSource, Spec
from quire_operator.capacity.hub import HubReader
from quire_operator.capacity.judge import Labels, draft_hub_source, hub_source, judge, replica_memory
from quire_operator.deployment.conditions import BlockingCondition
from quire_operator.kube.client import KubeClient
from quire_operator.kube.errors import ClusterError
from quire_operator.kube.objects import DeploymentState, Key

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 3.0
"""The wait for the first answer about a model; later callers wait only for the rest of it."""
_FRESH_SECONDS = 600.0
_NODES_SECONDS = 60.0
CHECK_AGAIN_SECONDS = 60.0
"""The time after which a blocked spec is checked again: nodes and models change, and no watch reports that."""
_AT_ONCE = 8
_MOST_MODELS = 2048


@dataclass(slots=True)
class _Model:
    facts: ModelFacts | None = None
    """The last answer; kept if a later lookup fails."""
    fresh_until: float = 0.0
    lookup: asyncio.Task[None] | None = None
    asked: float = 0.0
    waiting: set[Key] = field(default_factory=set)
    """The LLMDeployments that continued without the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check; empty if the spec fits or that is unknown."""

    blocking: BlockingCondition | None = None
    """The spec does not fit, so nothing is created or changed."""
    nonblocking: BlockingCondition | None = None
    """The spec does not fit, and was applied before that was known."""


class CapacityCheck:
    """The capacity check of all passes and reviews of a process; the owner closes it."""

    def __init__(
        self, *, hub: HubReader, kube: KubeClient | None, now: Callable[[], float], enqueue: Callable[[Key], None]
    ) -> None:
        """``kube`` is None if nodes may not be listed. ``now`` is a monotonic clock."""
        self._hub, self._kube, self._now, self._enqueue = hub, kube, now, enqueue
        self._known: dict[HubSource, _Model] = {}
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._labels: tuple[Labels, ...] | None = None
        self._labels_until = 0.0
        self._listing = asyncio.Lock()

    async def aclose(self) -> None:
        lookups = [model.lookup for model in self._known.values() if model.lookup is not None]
        for lookup in lookups:
            lookup.cancel()
        await asyncio.gather(*lookups, return_exceptions=True)
        await self._hub.aclose()

    async def check(self, key: Key, spec: Spec, applied: DeploymentState | None) -> Finding:
        """Return what prevents the spec from being applied, or is only to be reported.

        ``applied`` is the Deployment to which it was applied before. It continues: a ready replica disproves any
        estimate.
        """
        if applied is None:
            return Finding(blocking=await self.refusal(spec, key=key))
        if applied.ready:
            return Finding()
        return Finding(nonblocking=await self.refusal(spec, key=key, wait_seconds=0.0))

    async def refusal(
        self, spec: Spec, *, key: Key | None = None, wait_seconds: float = _WAIT_SECONDS
    ) -> BlockingCondition | None:
        """Return why the spec does not fit, or None if it fits or that is unknown.

        If it is unknown, ``key`` is enqueued as soon as it is known.
        """
        source = hub_source(spec)
        if source is None:
            return None
        state = replica_memory(spec, await self._node_labels() if spec.resources.gpus else None)
        if state is None and spec.parallelism.ranks == 1:
            return None
        named = draft_hub_source(spec)
        sources = [source, *([] if named is None else [named])]
        facts, *drafts = await asyncio.gather(*(self._facts(each, key, wait_seconds) for each in sources))
        return None if facts is None else judge(spec, facts, state, draft=drafts[0] if drafts else None)

    async def _node_labels(self) -> tuple[Labels, ...] | None:
        if self._kube is None:
            return None
        async with self._listing:
            if self._now() >= self._labels_until:
                try:
                    self._labels = await self._kube.node_labels()
                except ClusterError as error:
                    logger.debug("GPUs of the nodes are unknown: %s", error)
                self._labels_until = self._now() + _NODES_SECONDS
        return self._labels

    async def _facts(self, source: HubSource, key: Key | None, wait_seconds: float) -> ModelFacts | None:
        model = self._model(source)
        now = self._now()
        if model.lookup is None and now >= model.fresh_until and not self._hub.is_paused:
            model.asked = now
            model.lookup = asyncio.create_task(self._look_up(source, model), name=f"capacity of {source}")
        if model.lookup is None or model.facts is not None:
            return model.facts
        await asyncio.wait({model.lookup}, timeout=max(0.0, model.asked + wait_seconds - self._now()))
        if model.lookup is not None and key is not None:
            model.waiting.add(key)
        return model.facts

    def _model(self, source: HubSource) -> _Model:
        """Return the cache entry, which becomes the most recently used; the oldest entries are evicted."""
        model = self._known.pop(source, None) or _Model()
        self._known[source] = model
        while len(self._known) > _MOST_MODELS:
            gone = self._known.pop(next(iter(self._known)))
            if gone.lookup is not None:
                gone.lookup.cancel()
        return model

    async def _look_up(self, source: HubSource, model: _Model) -> None:
        before = model.facts
        try:
            async with self._turn:
                if self._hub.is_paused:
                    return
                model.facts = await self._hub.facts(source) or before
            model.fresh_until = self._now() + _FRESH_SECONDS
        finally:
            model.lookup = None
            waiting, model.waiting = model.waiting, set()
        if model.facts != before:
            for key in waiting:
                self._enqueue(key)
