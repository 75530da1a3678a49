"""Other client libraries, from their own environment, against the demo model."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
PYTHON = Path(__file__).parents[3] / ".venv-clients" / "bin" / "python"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("script", "calls"), [("langchain_calls.py", 12), ("litellm_calls.py", 16)])
def test_usual_calls_of_client_libraries_work_unchanged(demo_server: Any, script: str, calls: int) -> None:
    """Each script makes its calls in sequence and names each that worked."""
    make_calls(demo_server, script, calls)


def test_embeddings_and_reranking_work_unchanged(start_server: Any) -> None:
    with start_server("--runner", "pooling") as server:
        make_calls(server, "embedding_calls.py", 6)


def make_calls(server: Any, script: str, calls: int) -> None:
    assert PYTHON.is_file(), "there is no .venv-clients: run make setup-dev"
    done = subprocess.run(
        [PYTHON, SCRIPTS / script, server.address, server.key],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"after {done.stdout.split()}:\n{done.stderr[-3000:]}"
    assert len(done.stdout.split()) == calls
