"""LLMAdapters of scenarios: applied objects, their conditions, and folders that no replica can serve.

A ConfigMap has the invalid folders; the pods of the LLMDeployment mount it, so that their sources are paths.
"""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from e2e_support.kube import namespaced
from e2e_support.objects import Condition
from e2e_support.space import Resource, Space

JSON = dict[str, Any]
_CONFIG_MAP: Final = "invalid-adapters"
_FOLDER: Final = "/adapters"
CONDITION_SECONDS: Final = 90.0
HIGH_RANK: Final = 64
_CONFIG, _WEIGHTS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


class LLMAdapter(Resource):
    plural = "llmadapters"

    def wait_reason(self, reason: str) -> Condition:
        """Wait until the condition Ready has this reason."""

        def look() -> Condition | None:
            found = self.conditions().get("Ready")
            return found if found is not None and found.reason == reason else None

        return self.until(look, what=f"Ready with reason {reason}", seconds=CONDITION_SECONDS)

    def wait_loaded(self, replicas: int) -> None:
        """Wait until so many replicas, which are all that are ready, have loaded it."""

        def look() -> bool:
            status = self.status()
            return (status.get("loadedReplicas"), status.get("replicas")) == (replicas, replicas)

        self.until(look, what=f"{replicas} replicas have loaded it", seconds=CONDITION_SECONDS)


def apply_adapter(
    space: Space, name: str, *, deployment: str, source: str, served_name: str | None = None
) -> LLMAdapter:
    """Create an LLMAdapter with a unique servedName, or with the given one."""
    model = served_name or space.unique(name)
    spec = {"deploymentRef": {"name": deployment}, "source": source, "servedName": model}
    body = {"apiVersion": "quire.dev/v1alpha1", "kind": "LLMAdapter", "metadata": {"name": name}, "spec": spec}
    space.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    return LLMAdapter(space.kube, space.name, name, model=model)


def invalid_folders(adapter: Path) -> Mapping[str, Mapping[str, bytes]]:
    """Return folders that no replica can serve, made from a valid one: files by name, by the name of the folder."""
    config, weights = json.loads((adapter / _CONFIG).read_text()), (adapter / _WEIGHTS).read_bytes()
    plain = json.dumps({**config, "rank_pattern": {}}).encode()
    header = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])
    a = next(name for name in header if name.endswith("q_proj.lora_A.weight"))
    b = a.replace("lora_A", "lora_B")
    rank, inputs, outputs = config["r"], header[a]["shape"][1], header[b]["shape"][0]
    small = tensors({a: (rank, inputs // 2), b: (outputs, rank)})
    tall = tensors({a: (HIGH_RANK, inputs), b: (outputs, HIGH_RANK)})
    high = json.dumps({**config, "r": HIGH_RANK, "rank_pattern": {}}).encode()
    return {
        "wrong-base": {_CONFIG: plain, _WEIGHTS: small},
        "rank-too-high": {_CONFIG: high, _WEIGHTS: tall},
        "pickled": {_CONFIG: plain, _PICKLE: b"\x80\x04."},
        "truncated": {_CONFIG: plain, _WEIGHTS: weights[:4096]},
    }


def tensors(shapes: Mapping[str, tuple[int, int]]) -> bytes:
    """Return a safetensors file with zeros in float32."""
    header: JSON = {}
    size = 0
    for name, (rows, columns) in shapes.items():
        end = size + 4 * rows * columns
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def provide_folders(space: Space, folders: Mapping[str, Mapping[str, bytes]]) -> JSON:
    """Create a ConfigMap with the folders; return the change of a spec whose replicas mount it."""
    files = {(folder, name): content for folder, found in folders.items() for name, content in found.items()}
    data = {f"{folder}.{name}": base64.b64encode(content).decode() for (folder, name), content in files.items()}
    space.kube.create(namespaced(space.name, "configmaps"), {"metadata": {"name": _CONFIG_MAP}, "binaryData": data})
    items = [{"key": f"{folder}.{name}", "path": f"{folder}/{name}"} for folder, name in files]
    mount = {"name": _CONFIG_MAP, "mountPath": _FOLDER, "readOnly": True}
    volume = {"name": _CONFIG_MAP, "configMap": {"name": _CONFIG_MAP, "items": items}}
    engine = {"name": "engine", "volumeMounts": [mount]}
    return {"podTemplate": {"spec": {"containers": [engine], "volumes": [volume]}}}


def path_source(folder: str) -> str:
    """Return the source of a folder of ``provide_folders``."""
    return f"file://{_FOLDER}/{folder}"
