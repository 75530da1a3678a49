"""The volume of an oci:// model depends on the cluster, which is tested only if a spec needs it."""

from collections.abc import Mapping
from typing import Any

import pytest

from quire_operator.adapters.kubernetes.image_volumes import ImageVolumes
from quire_operator.domain.cluster_state.observed import Ref
from quire_operator.ports import ClusterError, Forbidden, QuotaExceeded, Refused, Unavailable

DEPLOYMENT = {"metadata": {"name": "chat"}}
IMAGE = {"source": "oci://registry.example/llama:1"}


def ways(world: Any) -> tuple[bool, bool]:
    """Return whether the pods have an image volume, and whether they download."""
    pod = world.cluster.manifests[Ref("Deployment", "chat")].body["spec"]["template"]["spec"]
    return any("image" in volume for volume in pod["volumes"]), "initContainers" in pod


@pytest.mark.parametrize(("there", "expected"), [(True, (True, False)), (False, (False, True))])
async def test_image_volume_is_used_if_supported(world: Any, there: bool, expected: tuple[bool, bool]) -> None:
    world.cluster.image_volumes = there
    world.apply(model=IMAGE)
    await world.settle()
    assert ways(world) == expected


@pytest.mark.parametrize("model", [{**IMAGE, "cache": {"claimName": "models"}}, {"source": "hf://org/m"}])
async def test_specs_without_images_need_no_dry_run(world: Any, model: Mapping[str, Any]) -> None:
    world.cluster.errors["image volumes"] = [Unavailable("must not be asked")]
    world.apply(model=model)
    await world.settle()
    assert ways(world) == (False, True)


async def test_nothing_changes_while_the_dry_run_is_unavailable(world: Any) -> None:
    world.cluster.image_volumes = True
    world.cluster.errors["image volumes"] = [Unavailable("the API server did not answer")]
    world.apply(model=IMAGE)
    with pytest.raises(Unavailable):
        await world.settle()
    assert not world.cluster.asked
    await world.settle()
    assert ways(world) == (True, False)


class Connection:
    """A connection that answers each write with the next outcome."""

    def __init__(self, *outcomes: ClusterError | list[Any] | None) -> None:
        """Use these outcomes: errors, or the volumes of the returned Deployment."""
        self.outcomes = list(outcomes)
        self.queries: list[Any] = []

    async def write(self, *_: Any, query: Any, **__: Any) -> Mapping[str, Any]:
        self.queries.append(query)
        result = self.outcomes.pop(0)
        if isinstance(result, ClusterError):
            raise result
        return {"spec": {"template": {"spec": {"volumes": result}}}}


@pytest.mark.parametrize(
    ("result", "supported"),
    [
        ([{"name": "probe", "image": {"reference": "probe"}}], True),
        (None, False),
        ([{"name": "probe", "emptyDir": {}}], False),
        (Refused('.spec.template.spec.volumes[name="models"].image: field not declared in schema'), False),
    ],
)
async def test_dry_run_results_are_reported_and_kept(result: ClusterError | list[Any] | None, supported: bool) -> None:
    connection = Connection(result)
    volumes = ImageVolumes(connection)  # type: ignore[arg-type]
    assert [await volumes.supported("prod", DEPLOYMENT) for _ in range(2)] == [supported] * 2
    assert [("dryRun", "All") in query for query in connection.queries] == [True]


async def test_inconclusive_dry_run_is_repeated() -> None:
    policy = Refused("ValidatingAdmissionPolicy 'registries' denied request: image is not allowed")
    user = Refused(".spec.template.spec.nodeSelektor: field not declared in schema")
    errors = [Forbidden("no"), QuotaExceeded("full"), policy, user]
    volumes = ImageVolumes(Connection(*errors, [{"image": {}}]))  # type: ignore[arg-type]
    for error in errors:
        with pytest.raises(type(error)):
            await volumes.supported("strict", DEPLOYMENT)
    assert await volumes.supported("prod", DEPLOYMENT), "what one namespace rejects says nothing about another"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Refused("ValidatingAdmissionPolicy denied request"), "InvalidSpec"),
        (QuotaExceeded("exceeded quota"), "QuotaExceeded"),
        (Forbidden("no permission"), "Forbidden"),
    ],
)
async def test_rejected_dry_run_is_a_condition_and_creates_nothing(
    world: Any, error: ClusterError, reason: str
) -> None:
    world.cluster.errors["image volumes"] = [error] * 10
    world.apply(model=IMAGE)
    await world.settle()
    assert world.condition("Ready") == f"False {reason}"
    assert Ref("Deployment", "chat") not in world.cluster.children
