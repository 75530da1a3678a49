"""`quire explain` as a user runs it against the cluster, and its output."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e_support.kube import Kube
from e2e_support.space import LLMDeployment

JSON = Mapping[str, Any]
_QUIRE = Path(sys.executable).with_name("quire")


def explain(kube: Kube, deployment: LLMDeployment, *, last: int = 10) -> str:
    """Return the screen with this number of decisions."""
    return _run(kube, deployment, "--last", str(last))


def explain_json(kube: Kube, deployment: LLMDeployment) -> JSON:
    """Return the output in JSON."""
    said: JSON = json.loads(_run(kube, deployment, "--json"))
    return said


def _run(kube: Kube, deployment: LLMDeployment, *more: str) -> str:
    command = [str(_QUIRE), "explain", deployment.name, "--namespace", deployment.namespace, *more]
    return kube.output(command, seconds=60)
