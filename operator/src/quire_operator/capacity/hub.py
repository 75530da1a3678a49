"""The hub of hf:// models: the public facts about a model, for a few kilobytes and seconds.

It does not use the hub's own client, which blocks, takes tens of megabytes of memory and uses any token that it finds:
the author of an LLMDeployment must not learn through it what only the operator may read. While the hub does not answer,
it is not asked for a minute. What is unknown is no error: pods ask the hub themselves.
"""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from quire_common.model_memory import ModelFacts, parse_model_config
from quire_common.safetensors_header import FIRST_READ_BYTES, NoWeights, count_parameters
from quire_operator import __version__
from quire_operator.api import HubSource

T = TypeVar("T")
HUB = "https://huggingface.co"
_ANSWER_SECONDS = 5.0
_MAX_BYTES = 8 << 20
"""The limit of one answer. The files have kilobytes, and the author of a spec must not fill the operator's memory."""
_MAX_FILES = 512
_AT_ONCE = 8
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHTS = re.compile(r"(?!consolidated)[^/]*\.safetensors")
"""The weight files without an index that the engine downloads: ``consolidated`` ones have the same weights again."""


class ModelUnknown(Exception):
    """The facts about a model are unavailable. ``unreachable`` is True if no model can be read at the moment."""

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class HubFacts:
    """A client with its own connection pool; the owner closes it."""

    def __init__(self, endpoint: str | None, *, token: str | None = None) -> None:
        """Use ``endpoint``, or the public hub if it is None. Without a token, requests are anonymous."""
        self._endpoint = (endpoint or HUB).rstrip("/")
        self._client = httpx.AsyncClient(
            timeout=_ANSWER_SECONDS,
            follow_redirects=True,
            headers={
                "User-Agent": f"quire-operator/{__version__}",
                "Accept-Encoding": "identity",
                **({"Authorization": f"Bearer {token}"} if token else {}),
            },
            limits=httpx.Limits(max_connections=2 * _AT_ONCE, max_keepalive_connections=_AT_ONCE),
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def facts(self, source: HubSource) -> ModelFacts:
        """Return the model's config and parameter count. Raises ``ModelUnknown``."""
        return await self._answered(source, self._facts(source))

    async def commit(self, source: HubSource) -> str:
        """Return the commit to which the source's revision resolves now. Raises ``ModelUnknown``."""
        return await self._answered(source, self._commit(source))

    async def _answered(self, source: HubSource, answer: Awaitable[T]) -> T:
        """Return the answer, or raise ``ModelUnknown`` for every failure."""
        try:
            return await answer
        except (httpx.TimeoutException, httpx.TransportError) as error:
            message = f"{self._endpoint} cannot be reached: {str(error) or type(error).__name__}"
            raise ModelUnknown(message, unreachable=True) from error
        except httpx.HTTPStatusError as error:
            overloaded = error.response.status_code >= 500 or error.response.status_code == 429
            message = f"{self._endpoint} answered {error.response.status_code} for {source}"
            raise ModelUnknown(message, unreachable=overloaded) from error
        except (
            httpx.HTTPError,
            httpx.InvalidURL,
            ValueError,
            TypeError,
            KeyError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise ModelUnknown(f"the hub's answer about {source} is not usable: {error}") from error

    async def _commit(self, source: HubSource) -> str:
        commit = (await self._info(source))["sha"]
        if not isinstance(commit, str) or not replace(source, revision=commit).is_pinned:
            raise ValueError("it names no commit")
        return commit

    async def _info(self, source: HubSource) -> Mapping[str, Any]:
        return await self._json(
            f"/api/models/{source.repository}/revision/{quote(source.revision, safe='')}?blobs=true"
        )

    async def _facts(self, source: HubSource) -> ModelFacts:
        info = await self._info(source)
        version = quote(str(info.get("sha") or source.revision), safe="")
        sizes = {str(file["rfilename"]): int(file.get("size") or 0) for file in info.get("siblings") or ()}
        where = f"/{source.repository}/resolve/{version}"
        config = parse_model_config(await self._json(f"{where}/config.json"))
        if isinstance(config, tuple):
            raise ValueError("; ".join(map(str, config)))
        names = await self._weights(where, sizes)
        files = {f"{where}/{quote(name)}": sizes[name] for name in names}
        return ModelFacts(config=config, parameters=await self._count_all(files), counted=True)

    async def _weights(self, where: str, sizes: Mapping[str, int]) -> list[str]:
        """Return the names of the weight files, chosen as the engine does."""
        if _SINGLE in sizes:
            return [_SINGLE]
        if _INDEX in sizes:
            index = await self._json(f"{where}/{_INDEX}")
            names = sorted(set(map(str, dict(index["weight_map"]).values())))
        else:
            names = sorted(name for name in sizes if _WEIGHTS.fullmatch(name))
        if not names:
            raise ValueError("it has no safetensors weights")
        if len(names) > _MAX_FILES:
            raise ValueError(f"its weights are in {len(names)} files")
        return names

    async def _count_all(self, files: Mapping[str, int]) -> int:
        turn = asyncio.Semaphore(_AT_ONCE)

        async def count(path: str, size_bytes: int) -> int:
            async with turn:
                return await self._count(path, size_bytes)

        try:
            async with asyncio.TaskGroup() as group:
                counts = [group.create_task(count(path, size)) for path, size in files.items()]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return sum(task.result() for task in counts)

    async def _count(self, path: str, size_bytes: int) -> int:
        """Return the number of parameters in one file, according to its header."""
        data = await self._bytes(path, start=0, stop=FIRST_READ_BYTES)
        end = 8 + int.from_bytes(data[:8], "little")
        if len(data) < end <= min(size_bytes, _MAX_BYTES):
            data += await self._bytes(path, start=len(data), stop=end)
        try:
            return count_parameters(lambda start, size: data[start : start + size], size_bytes)
        except NoWeights as error:
            raise ValueError(f"{path}: {error}") from error

    async def _json(self, path: str) -> Mapping[str, Any]:
        body = json.loads(await self._bytes(path))
        if not isinstance(body, Mapping):
            raise ValueError(f"{path} is not a JSON object")
        return body

    async def _bytes(self, path: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """Return the body, or bytes ``start`` to ``stop`` of it. Raises ``ValueError`` if it is too large."""
        headers = {} if stop is None else {"Range": f"bytes={start}-{stop - 1}"}
        most = _MAX_BYTES if stop is None else stop - start
        async with self._client.stream("GET", f"{self._endpoint}{path}", headers=headers) as answer:
            answer.raise_for_status()
            if start and answer.status_code != 206:
                raise ValueError(f"{path}: the server does not support ranges")
            data = bytearray()
            async for chunk in answer.aiter_bytes():
                data += chunk
                if len(data) >= most:
                    break
        if stop is None and len(data) > most:
            raise ValueError(f"{path} is larger than {most} bytes")
        return bytes(data[:most])


logger = logging.getLogger(__name__)


_COMMIT_SECONDS = 4.0
"""A pass waits for the commit."""
_FACTS_SECONDS = 20.0
"""For all files of a model; each of them has five seconds."""
_PAUSE_SECONDS = 60.0


class HubReader:
    """The hub, for all passes and reviews of a process; close it."""

    def __init__(self, models: HubFacts, *, now: Callable[[], float]) -> None:
        """``now`` is a monotonic clock."""
        self._models, self._now = models, now
        self._paused_until = float("-inf")

    async def aclose(self) -> None:
        await self._models.aclose()

    @property
    def is_paused(self) -> bool:
        """True while the hub is not asked, because it did not answer."""
        return self._now() < self._paused_until

    async def commit(self, source: HubSource) -> str | None:
        """Return the commit that the source means now; None if that is unknown."""
        return await self._answer(self._models.commit, source, within_seconds=_COMMIT_SECONDS)

    async def facts(self, source: HubSource) -> ModelFacts | None:
        """Return the facts about a model; None if they are unknown."""
        return await self._answer(self._models.facts, source, within_seconds=_FACTS_SECONDS)

    async def _answer(
        self, question: Callable[[HubSource], Awaitable[T]], source: HubSource, *, within_seconds: float
    ) -> T | None:
        if self.is_paused:
            return None
        try:
            async with asyncio.timeout(within_seconds):
                return await question(source)
        except TimeoutError:
            unknown = ModelUnknown(f"no answer about {source} within {within_seconds:g} s", unreachable=True)
        except ModelUnknown as error:
            unknown = error
        logger.info(
            "the operator cannot read %s, so no size or revision is checked before its pods download it: %s",
            source,
            unknown,
        )
        if unknown.unreachable:
            self._paused_until = self._now() + _PAUSE_SECONDS
        return None
