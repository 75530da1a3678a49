"""The fake server for the tests of traffic."""

from collections.abc import Iterator

import pytest

from e2e_support.traffic.fake_server import Server, running


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as server:
        yield server
