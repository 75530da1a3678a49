"""Prometheus on the bridge and its scrape targets. Pure: configurations and command lines.

Debian's Prometheus is built without discovery of pods. `pod_discovery` finds them by the usual annotations and writes a
file for it. Series have the labels `namespace` and `pod` that the operator queries; labels of an exporter (the operator
names an LLMDeployment's namespace) take precedence.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from quire_cluster.nodes.plan import HOST_ADDRESS, PROMETHEUS_PORT, PROMETHEUS_URL

READY_URL: Final = f"{PROMETHEUS_URL}/-/ready"
SCRAPE_INTERVAL: Final = "2s"
ANNOTATIONS: Final = "prometheus.io/"


def config(targets: Path) -> str:
    pods = {
        "job_name": "pods",
        "honor_labels": True,
        "file_sd_configs": [{"files": [str(targets)]}],
        "tls_config": {"insecure_skip_verify": True},  # a pod's own certificate, at its address
    }
    document = {
        "global": {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL},
        "scrape_configs": [pods],
    }
    return json.dumps(document, indent=2) + "\n"


def command(program: Path, config_file: Path, data: Path) -> list[str]:
    return [
        str(program),
        f"--config.file={config_file}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address={HOST_ADDRESS}:{PROMETHEUS_PORT}",
    ]


def targets(pods: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the content of the file: running pods with scrape annotations, sorted by name."""
    groups = (group for pod in pods if (group := _target(pod)) is not None)
    return sorted(groups, key=lambda group: (group["labels"]["namespace"], group["labels"]["pod"]))


def _target(pod: Mapping[str, Any]) -> dict[str, Any] | None:
    metadata, status = pod["metadata"], pod.get("status", {})
    annotations = metadata.get("annotations", {})
    address, port = status.get("podIP"), annotations.get(f"{ANNOTATIONS}port")
    is_asked = annotations.get(f"{ANNOTATIONS}scrape") == "true" and port is not None
    if not is_asked or address is None or status.get("phase") != "Running":
        return None
    labels = {
        "__scheme__": annotations.get(f"{ANNOTATIONS}scheme", "http"),
        "__metrics_path__": annotations.get(f"{ANNOTATIONS}path", "/metrics"),
        "namespace": metadata["namespace"],
        "pod": metadata["name"],
        "node": pod["spec"].get("nodeName", ""),
    }
    return {"targets": [f"{address}:{port}"], "labels": labels}
