"""The support for images as volumes in this cluster, which is requested only if a spec needs it."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from quire_operator.domain.cluster_state.observed import Child, Ref, Resource
from quire_operator.domain.manifests.model_volume import wants_image_volume
from quire_operator.domain.manifests.objects import Manifests
from quire_operator.domain.manifests.pod_template import Images
from quire_operator.domain.resource import Invalid, Spec
from quire_operator.ports import Cluster


async def images_for(
    cluster: Cluster,
    images: Images,
    resource: Resource,
    spec: Spec,
    children: Mapping[Ref, Child],
    rendered: Callable[[Images], Manifests | Invalid],
) -> Images:
    """Return ``images`` with what a dry run of the Deployment with an image volume showed. Raises ``ClusterError``."""
    if images.image_volumes is not None or not wants_image_volume(spec):
        return images
    with_volume = replace(images, image_volumes=True)
    manifests = rendered(with_volume)
    there = children.get(Ref("Deployment", resource.key.name))
    is_taken = there is not None and (there.owner is None or there.owner.uid != resource.uid)
    if isinstance(manifests, Invalid) or is_taken:
        return with_volume  # the problem is reported before anything is applied
    supported = await cluster.takes_image_volumes(resource.key, manifests.trial)
    return replace(images, image_volumes=supported)
