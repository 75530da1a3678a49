"""Fixtures for every test folder: a real API server (`api_server`, `namespace`, `cluster_binaries`)."""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["quire_cluster.pytest_plugin"]

# A busy machine must not fail a test: neither an example nor its generation has a time limit. A commit is judged by the
# same examples each time; `make soak` sets the number of examples and searches for new ones.
settings.register_profile(
    "quire",
    deadline=None,
    derandomize="QUIRE_HYPOTHESIS_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("quire")


@pytest.fixture(autouse=True)
def own_root_logger() -> Iterator[None]:
    """Restore the root logger, because a handler of a command under test would outlive the stream that it writes to."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
