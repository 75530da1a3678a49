"""hf:// as an ``Origin``: the files of a hub's model, asked for with the hub's token.

The hub's own client starts a file anew in each process, so ``transfer`` moves the bytes.
"""

from pathlib import Path

from quire_operator.adapters.fetch import hub
from quire_operator.adapters.fetch.remote_files import (
    Answer,
    Description,
    Listing,
    PlainFiles,
    RemoteFile,
    Request,
    Unreachable,
)
from quire_operator.domain.resource import HubSource
from quire_operator.errors import ModelProblem


class HubOrigin(PlainFiles):
    """A repository at a revision."""

    def __init__(self, source: HubSource) -> None:
        self._source = source

    def listing(self) -> Listing:
        return hub.list_files(self._source.repository, self._source.revision)

    def describe(self) -> Description:
        return hub.describe(self._source.repository, self._source.revision)

    def elsewhere(self, listing: Listing) -> Path | None:
        return hub.in_the_hubs_own_cache(listing)

    def request(self, file: RemoteFile) -> Request:
        return Request(url=file.address, headers=hub.request_headers())

    def refusal(self, file: RemoteFile, answer: Answer) -> ModelProblem | None:
        if answer.status in (401, 403):
            return hub.gated(self._source.repository)
        return ModelProblem(f"{file.address} answered {answer.status}")

    def unreachable(self, error: BaseException) -> Unreachable:
        return hub.unreachable(self._source.repository, error)
