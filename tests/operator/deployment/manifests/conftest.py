"""Specs as users write them, and the pods rendered from them."""

from collections.abc import Callable
from typing import Any

import pytest
from rendering import IMAGES
from specs import valid_spec

from quire_operator.api import Invalid
from quire_operator.deployment.desired import desired
from quire_operator.deployment.manifests import Manifests
from quire_operator.deployment.pod_template import Images

MODEL = {"source": "file:///models/demo"}


@pytest.fixture
def make() -> Callable[..., Manifests | Invalid]:
    """Return a function that renders a spec with these fields."""

    def made(*, target: int = 2, images: Images = IMAGES, **spec: Any) -> Manifests | Invalid:
        return desired(valid_spec(**{"model": MODEL} | spec), target, uid="uid-1", images=images)

    return made


@pytest.fixture
def children(make: Callable[..., Manifests | Invalid]) -> Callable[..., Manifests]:
    """Return the same function for valid specs."""

    def made(**spec: Any) -> Manifests:
        manifests = make(**spec)
        assert isinstance(manifests, Manifests), str(manifests)
        return manifests

    return made


@pytest.fixture
def pod(children: Callable[..., Manifests]) -> Callable[..., Any]:
    """Return a function that renders the pod's spec."""

    def made(**spec: Any) -> Any:
        body: Any = children(**spec).workload.body
        return body["spec"]["template"]["spec"]

    return made


@pytest.fixture
def problems(make: Callable[..., Manifests | Invalid]) -> Callable[..., dict[str, str]]:
    """Return a function that returns path → message for invalid specs."""

    def found(**spec: Any) -> dict[str, str]:
        manifests = make(**spec)
        assert isinstance(manifests, Invalid), "it was accepted"
        return {problem.path: problem.message for problem in manifests.problems}

    return found
