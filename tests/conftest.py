"""Fixtures for every test folder: a real API server (`api_server`, `namespace`, `cluster_binaries`)."""

import logging
import os
from collections.abc import Iterator
from functools import lru_cache

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

pytest_plugins = ["quire_cluster.pytest_plugin"]

# A busy machine must not fail a test: neither an example nor its generation has a time limit. A commit is judged by the
# same few examples each time; `make soak` sets their number and searches for new ones.
IS_SEARCH = "QUIRE_HYPOTHESIS_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("QUIRE_HYPOTHESIS_EXAMPLES", "50"))
if not IS_SEARCH:
    # Hypothesis also draws constants of the modules that are imported, so that the examples of a test would depend on
    # the tests before it. It has no setting for this.
    providers.is_local_module_file = lru_cache(lambda path: False)  # type: ignore[attr-defined]
settings.register_profile(
    "quire",
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not IS_SEARCH,
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
