"""A real Prometheus with recorded samples, and promtool: from Debian's package or from the PATH."""

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire_cluster.debian import debian_programs
from quire_cluster.ports import free_ports

PROGRAMS = ("prometheus", "promtool")


def promtool(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = debian_programs("prometheus", PROGRAMS)["promtool"]
    return subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


class RecordedPrometheus:
    """A Prometheus that scrapes nothing and answers queries about the recording."""

    def __init__(self, samples: str, folder: Path) -> None:
        (folder / "samples.om").write_text(samples)
        made = promtool("tsdb", "create-blocks-from", "openmetrics", "samples.om", "data", folder=folder)
        assert made.returncode == 0, made.stderr
        (folder / "prometheus.yml").write_text("scrape_configs: []\n")
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        self._log = (folder / "prometheus.log").open("wb")
        program = debian_programs("prometheus", PROGRAMS)["prometheus"]
        flags = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}"]
        self._process = subprocess.Popen([program, *flags], cwd=folder, stdout=self._log, stderr=self._log)
        try:
            self._wait(folder)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def instant(self, query: str, *, at: float) -> list[dict[str, Any]]:
        """Return the series with one value each."""
        return self._get("query", {"query": query, "time": str(at)})

    def over(self, query: str, *, start: float, end: float, step: int) -> list[dict[str, Any]]:
        """Return the series with their values, as a graph requests them."""
        asked = {"query": query, "start": str(start), "end": str(end), "step": str(step)}
        return self._get("query_range", asked)

    def _get(self, what: str, asked: Mapping[str, str]) -> list[dict[str, Any]]:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(asked)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                result: list[dict[str, Any]] = json.load(reply)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{asked['query']}: {error.read().decode()}") from error
        return result

    def _wait(self, folder: Path) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.05)
        raise AssertionError((folder / "prometheus.log").read_text()[-2000:])
