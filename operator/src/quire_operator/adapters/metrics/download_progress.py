"""``ports.ProgressReader`` over HTTP.

A pod that does not answer is no error, because it may wait for the download of another pod.
"""

from quire_operator.adapters.metrics.pages import NoPage, Pages

_TIMEOUT_SECONDS = 3.0
_MAX_BYTES = 2**19
"""A pod's report about 2,000 adapters, which is the longest answer, has about this size."""


class DownloadProgress:
    """A reader of the progress of downloads."""

    def __init__(self) -> None:
        self._pages = Pages(timeout_seconds=_TIMEOUT_SECONDS, max_bytes=_MAX_BYTES)

    async def aclose(self) -> None:
        await self._pages.aclose()

    async def read(self, url: str) -> bytes | None:
        """See ``ports.ProgressReader``."""
        try:
            return await self._pages.read(url)
        except NoPage:
            return None
