"""helm as a user runs it, with its own folders; with a kubeconfig it reaches a cluster."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from quire_cluster.errors import HelmFailed

# The CRD takes the pure Python loader a third of a second.
FastLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Helm:
    """A helm program and a chart."""

    def __init__(self, program: Path, chart: Path, folder: Path, *, kubeconfig: Path | None = None) -> None:
        self._program, self._chart, self._folder = program, chart, folder
        homes = {f"HELM_{kind}_HOME": str(folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        self._rendered: dict[str, str] = {}
        self._environment = os.environ | homes | {"KUBECONFIG": str(kubeconfig or folder / "no-kubeconfig")}

    def run(self, *arguments: str) -> str:
        """Return the output of helm."""
        command = [str(self._program), *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise HelmFailed(done.stderr)
        return done.stdout

    def on_chart(self, verb: str, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        """Run `helm VERB [RELEASE] CHART …` with the values in a file, so that they keep their types."""
        file = self._folder / "values.yaml"
        file.write_text(yaml.safe_dump(dict(values or {})))
        names = [argument for argument in arguments if not argument.startswith("-")]
        flags = [argument for argument in arguments if argument.startswith("-")]
        return self.run(verb, *names, str(self._chart), *flags, "--values", str(file))

    def template(
        self, values: Mapping[str, Any] | None = None, *, release: str = "quire", namespace: str = "llm"
    ) -> list[dict[str, Any]]:
        """Return the rendered objects; the same values always give the same objects."""
        asked = json.dumps([values, release, namespace])
        if asked not in self._rendered:
            self._rendered[asked] = self.on_chart("template", release, f"--namespace={namespace}", values=values)
        return [document for document in yaml.load_all(self._rendered[asked], FastLoader) if document]
