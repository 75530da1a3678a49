"""The volume of an oci:// model depends on the cluster, which is tested only if a spec needs it."""

from collections.abc import Mapping
from typing import Any

import pytest

from quire_operator.deployment.manifests import Manifest
from quire_operator.kube.client import KubeClient
from quire_operator.kube.errors import ClusterError, Forbidden, QuotaExceeded, Refused, Unavailable
from quire_operator.kube.objects import Key, Ref

DEPLOYMENT = Manifest(ref=Ref("Deployment", "chat"), body={"metadata": {"name": "chat"}})
IMAGE = {"source": "oci://registry.example/llama:1"}


def has_image(world: Any) -> bool:
    """Return whether the pods have an image volume."""
    pod = world.cluster.manifests[Ref("Deployment", "chat")].body["spec"]["template"]["spec"]
    return any("image" in volume for volume in pod["volumes"])


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": IMAGE}, "spec.model.source"),
        ({"engine": {"speculation": {"method": "DraftModel", "draft": IMAGE}}}, "spec.engine.speculation.draft.source"),
    ],
)
async def test_image_is_refused_until_the_cluster_mounts_images(
    world: Any, spec: Mapping[str, Any], field: str
) -> None:
    world.cluster.image_volumes = False
    world.apply(**spec)
    await world.settle()
    assert world.condition("Ready") == "False InvalidSpec"
    assert world.message("Ready").startswith(f"{field}: ")
    assert Ref("Deployment", "chat") not in world.cluster.children
    world.cluster.image_volumes = True
    await world.settle()
    assert has_image(world)


async def test_specs_without_images_need_no_dry_run(world: Any) -> None:
    world.cluster.errors["image volumes"] = [Unavailable("must not be asked")]
    world.apply(model={"source": "hf://org/m"})
    await world.settle()
    assert not has_image(world)


async def test_nothing_changes_while_the_dry_run_is_unavailable(world: Any) -> None:
    world.cluster.image_volumes = True
    world.cluster.errors["image volumes"] = [Unavailable("the API server did not answer")]
    world.apply(model=IMAGE)
    with pytest.raises(Unavailable):
        await world.settle()
    assert not world.cluster.asked
    await world.settle()
    assert has_image(world)


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
    "result",
    [
        None,
        [{"name": "probe", "emptyDir": {}}],
        Refused('.spec.template.spec.volumes[name="models"].image: field not declared in schema'),
    ],
)
async def test_dry_run_is_repeated_until_images_are_mounted(result: ClusterError | list[Any] | None) -> None:
    connection = Connection(result, [{"name": "probe", "image": {"reference": "probe"}}])
    kube = KubeClient(connection)  # type: ignore[arg-type]
    assert [await kube.takes_image_volumes(Key("prod", "chat"), DEPLOYMENT) for _ in range(3)] == [False, True, True]
    assert [("dryRun", "All") in query for query in connection.queries] == [True, True]


async def test_inconclusive_dry_run_is_repeated() -> None:
    policy = Refused("ValidatingAdmissionPolicy 'registries' denied request: image is not allowed")
    user = Refused(".spec.template.spec.nodeSelektor: field not declared in schema")
    errors = [Forbidden("no"), QuotaExceeded("full"), policy, user]
    kube = KubeClient(Connection(*errors, [{"image": {}}]))  # type: ignore[arg-type]
    for error in errors:
        with pytest.raises(type(error)):
            await kube.takes_image_volumes(Key("strict", "chat"), DEPLOYMENT)
    assert await kube.takes_image_volumes(Key("prod", "chat"), DEPLOYMENT), (
        "what one namespace rejects says nothing about another"
    )


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
