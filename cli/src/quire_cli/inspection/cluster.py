"""Reads a cluster for ``quire explain`` and ``quire top``, with the user's kubeconfig and GET requests only.

Pods are read through the API server (pods/proxy), so no port forwarding is needed. Raises ``ClusterError``.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import yaml
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.config_exception import ConfigException

from quire_operator.api import names
from quire_operator.errors import ClusterProblem
from quire_operator.kube.connection import JSON, Connection, in_cluster, listed, own_namespace
from quire_operator.kube.objects import Key, Pod, Resource
from quire_operator.kube.trimming import key_of_child, trim_pod, trim_resource

_DEFAULT = Path.home() / ".kube" / "config"
_RESOURCES = f"/apis/{names.API_VERSION}"
_OPERATORS = f"{names.LABEL_APP}=quire,{names.LABEL_COMPONENT}=operator"


class KubeReader:
    """A connection to a cluster, which the caller closes."""

    def __init__(self, connection: Connection, *, namespace: str, label: str) -> None:
        self._connection = connection
        self.namespace = namespace
        """The default namespace."""
        self.label = label
        """The name of the cluster in messages."""

    @classmethod
    async def connect(cls, kubeconfig: str | None, context: str | None) -> "KubeReader":
        """Connect as kubectl would, or as this pod; raise ``ClusterProblem``."""
        configuration: Configuration = type.__call__(Configuration)
        kubeconfig = kubeconfig or os.environ.get("KUBECONFIG")
        as_pod = kubeconfig is None and context is None and in_cluster()
        # Several files may be joined. The library ignores missing files, even if all are missing.
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
        """Return one LLMDeployment; raise ``NotFound`` also if the kind does not exist."""
        path = f"{_RESOURCES}/namespaces/{quote(key.namespace)}/{names.PLURAL}/{quote(key.name)}"
        return trim_resource(await self._connection.read(path))

    async def resources(self, namespace: str | None) -> list[Resource]:
        return [trim_resource(item) async for item in self._list(_RESOURCES, names.PLURAL, namespace)]

    async def replicas(self, namespace: str | None) -> list[tuple[Key, Pod]]:
        """Return the pods that stand for replicas of LLMDeployments: of a group of pods, its leader."""
        found = self._list("/api/v1", "pods", namespace, ("labelSelector", names.LABEL_DEPLOYMENT))
        pods = [(key, trim_pod(item)) async for item in found if (key := key_of_child(item)) is not None]
        return [(key, pod) for key, pod in pods if not pod.is_worker]

    async def operators(self, namespace: str | None) -> list[Key]:
        """Return the running pods of quire's operators."""
        found = self._list("/api/v1", "pods", namespace, ("labelSelector", _OPERATORS))
        return [
            Key(item["metadata"]["namespace"], item["metadata"]["name"])
            async for item in found
            if item.get("status", {}).get("phase") == "Running"
        ]

    async def page(self, pod: Key, port: int, path: str) -> bytes:
        """Return a page of a pod, read through the API server."""
        where = f"/api/v1/namespaces/{quote(pod.namespace)}/pods/{quote(pod.name)}:{port}/proxy{path}"
        return await self._connection.read_bytes(where)

    def _list(self, prefix: str, plural: str, namespace: str | None, *query: tuple[str, str]) -> AsyncIterator[JSON]:
        within = prefix if namespace is None else f"{prefix}/namespaces/{quote(namespace)}"
        return listed(self._connection.read, f"{within}/{plural}", query=query)


def _no_way(why: str) -> ClusterProblem:
    return ClusterProblem(
        f"no connection to a Kubernetes cluster: {why}",
        hint="set a kubeconfig with --kubeconfig or KUBECONFIG, and one of its contexts with --context;"
        " use --local for runs of quire up on this machine",
    )


async def _load(configuration: Configuration, kubeconfig: str | None, context: str | None) -> tuple[str, str]:
    """Return the context's namespace and the cluster's name in messages."""
    load = config.load_kube_config
    # Not persisted: reading must not rewrite the user's kubeconfig.
    loader = await load(  # type: ignore[no-untyped-call]
        config_file=kubeconfig, context=context, client_configuration=configuration, persist_config=False
    )
    current = loader.current_context
    return current["context"].get("namespace") or "default", f"context {current['name']}"
