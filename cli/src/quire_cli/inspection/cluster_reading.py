"""Looking at a cluster as the person who runs ``quire explain`` or ``quire top``: by their kubeconfig, by GET alone.

Pods are asked through the API server (pods/proxy), so no port need be forwarded. Raises ``ports.ClusterError``.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import yaml
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.config_exception import ConfigException

from quire_operator.adapters.kubernetes.connection import JSON, Connection, in_cluster, listed, own_namespace
from quire_operator.domain.cluster_state.observed import Key, Pod, Resource, key_of_child, trim_pod, trim_resource
from quire_operator.domain.resource import names
from quire_operator.errors import ClusterProblem

_DEFAULT = Path.home() / ".kube" / "config"
_RESOURCES = f"/apis/{names.API_VERSION}"
_OPERATORS = f"{names.LABEL_APP}=quire,{names.LABEL_COMPONENT}=operator"


class KubeReader:
    """One connection; close it."""

    def __init__(self, connection: Connection, *, namespace: str, label: str) -> None:
        self._connection = connection
        self.namespace = namespace
        """Where to look if nobody says otherwise."""
        self.label = label
        """What to call the cluster."""

    @classmethod
    async def connect(cls, kubeconfig: str | None, context: str | None) -> "KubeReader":
        """As kubectl would, or as the pod that we are. Raises ``ClusterProblem``."""
        configuration: Configuration = type.__call__(Configuration)
        kubeconfig = kubeconfig or os.environ.get("KUBECONFIG")
        as_pod = kubeconfig is None and context is None and in_cluster()
        # Several may be joined; the library passes over those that are missing, and then over there being none.
        files = [Path(file) for file in (kubeconfig or str(_DEFAULT)).split(os.pathsep)]
        if not as_pod and not any(file.is_file() for file in files):
            raise _no_way(f"there is no file {files[0]}")
        try:
            if as_pod:
                config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
                namespace, label = own_namespace(), "this cluster"
            else:
                namespace, label = await _load(configuration, kubeconfig, context)
        except (ConfigException, OSError, ValueError, yaml.YAMLError) as error:
            raise _no_way(str(error).strip()) from error
        configuration.client_session_kwargs = {"trust_env": False}
        return cls(Connection(configuration, user="reads only"), namespace=namespace, label=label)

    async def close(self) -> None:
        await self._connection.close()

    async def resource(self, key: Key) -> Resource:
        """One LLMDeployment; ``NotFound`` also where there is no such kind."""
        path = f"{_RESOURCES}/namespaces/{quote(key.namespace)}/{names.PLURAL}/{quote(key.name)}"
        return trim_resource(await self._connection.read(path))

    async def resources(self, namespace: str | None) -> list[Resource]:
        """All of a namespace, or of all."""
        return [trim_resource(item) async for item in self._list(_RESOURCES, names.PLURAL, namespace)]

    async def replicas(self, namespace: str | None) -> list[tuple[Key, Pod]]:
        """The pods of LLMDeployments."""
        found = self._list("/api/v1", "pods", namespace, ("labelSelector", names.LABEL_DEPLOYMENT))
        return [(key, trim_pod(item)) async for item in found if (key := key_of_child(item)) is not None]

    async def operators(self, namespace: str | None) -> list[Key]:
        """The pods of quire's operators that run."""
        found = self._list("/api/v1", "pods", namespace, ("labelSelector", _OPERATORS))
        return [
            Key(item["metadata"]["namespace"], item["metadata"]["name"])
            async for item in found
            if item.get("status", {}).get("phase") == "Running"
        ]

    async def page(self, pod: Key, port: int, path: str) -> bytes:
        """What a pod serves, through the API server."""
        where = f"/api/v1/namespaces/{quote(pod.namespace)}/pods/{quote(pod.name)}:{port}/proxy{path}"
        return await self._connection.read_bytes(where)

    def _list(self, prefix: str, plural: str, namespace: str | None, *query: tuple[str, str]) -> AsyncIterator[JSON]:
        within = prefix if namespace is None else f"{prefix}/namespaces/{quote(namespace)}"
        return listed(self._connection.read, f"{within}/{plural}", query=query)


def _no_way(why: str) -> ClusterProblem:
    return ClusterProblem(
        f"no way to a Kubernetes cluster: {why}",
        hint="name a kubeconfig by --kubeconfig or KUBECONFIG, and one of its contexts by --context;"
        " --local looks at what quire up serves on this machine",
    )


async def _load(configuration: Configuration, kubeconfig: str | None, context: str | None) -> tuple[str, str]:
    """The context's namespace, and what to call its cluster."""
    load = config.load_kube_config
    # Not persisted: whoever only looks must not rewrite a person's kubeconfig.
    loader = await load(  # type: ignore[no-untyped-call]
        config_file=kubeconfig, context=context, client_configuration=configuration, persist_config=False
    )
    current = loader.current_context
    return current["context"].get("namespace") or "default", f"context {current['name']}"
