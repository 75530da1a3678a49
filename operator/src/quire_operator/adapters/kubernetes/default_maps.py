"""``ports.DefaultMaps`` on a real API server: the ConfigMaps with defaults for LLMDeployments."""

from collections.abc import Mapping
from typing import Any

import yaml

from quire_operator.adapters.kubernetes.cluster import KubeCluster
from quire_operator.domain.resource.defaults import CONFIG_MAP, KEY
from quire_operator.ports import DefaultMap, PartlyForbidden

_CONFIG_MAPS = ("/api/v1", "configmaps")
_MOST_CHARACTERS = 65_536


class _Loader(yaml.SafeLoader):
    """A loader without aliases, with which a small text can become a document of any size."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not supported", None)
        return super().compose_node(parent, index)


class KubeDefaultMaps:
    """The ConfigMaps with defaults in the watched namespaces, and in the operator's own."""

    def __init__(self, cluster: KubeCluster, own: KubeCluster) -> None:
        """``own`` sees only the operator's namespace."""
        self._cluster, self._own = cluster, own

    async def list_defaults(self) -> list[DefaultMap]:
        """See ``ports.DefaultMaps``."""
        query = ("fieldSelector", f"metadata.name={CONFIG_MAP}")
        found = {}
        for cluster in (self._own, self._cluster):
            try:
                async for item in cluster.list_objects(_CONFIG_MAPS, query):
                    found[item["metadata"]["namespace"]] = item
            except PartlyForbidden:
                continue  # the resync reports namespaces that are gone
        return [_read(item) for _, item in sorted(found.items())]


def _read(item: Mapping[str, Any]) -> DefaultMap:
    metadata, data = item["metadata"], item.get("data") or {}
    document, problem = _parsed(data.get(KEY))
    return DefaultMap(
        namespace=metadata["namespace"], version=metadata["resourceVersion"], document=document, problem=problem
    )


def _parsed(text: object) -> tuple[object, str]:
    """Return the document of a text in YAML, or the reason why it has none."""
    if not isinstance(text, str):
        return None, "is required: defaults in the shape of spec, in YAML"
    if len(text) > _MOST_CHARACTERS:
        return None, f"must have at most {_MOST_CHARACTERS} characters, got {len(text)}"
    try:
        return yaml.load(text, Loader=_Loader) or {}, ""
    except yaml.YAMLError as error:
        return None, f"is not YAML: {error}"
    except (ValueError, RecursionError) as error:
        return None, f"is not YAML that can be read: {type(error).__name__}"
