"""One run of the scenarios for pytest's hooks in tests/e2e/conftest.py: the cluster and the reports.

It opens the target before the first scenario, collects evidence of failures, and writes out/e2e/ at the end.
"""

import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from e2e_support import evidence, results
from e2e_support.clusters import own_cluster, their_cluster
from e2e_support.kube import Kube
from e2e_support.prefetch import pull_everywhere
from e2e_support.refusals import Outage
from e2e_support.results import Report, scenario_name, slug
from e2e_support.space import Space, Words
from e2e_support.target import Settings, Target
from quire_cluster.progress import Progress

OUT: Final = Path(__file__).parents[3] / "out" / "e2e"
MakeSpace = Callable[[str], AbstractContextManager[Space]]
"""A namespace of the given name, which exists while the context lasts."""
_NAME: Final = 30


@dataclass(slots=True)
class Run:
    out: Path = OUT
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    reports: dict[str, Report] = field(default_factory=dict)
    """Reports by pytest's id of the test."""
    spaces: list[Space] = field(default_factory=list)
    """The existing namespaces."""
    outages: list[Outage] = field(default_factory=list)
    """Outages of the API server that scenarios caused."""
    settings: Settings | None = None
    target: Target | None = None
    evidence: dict[str, Path] = field(default_factory=dict)
    """The folder of the evidence by failure."""
    _open: ExitStack = field(default_factory=ExitStack)

    def open(self, environ: Mapping[str, str], progress: Progress) -> None:
        """Open the target. Raise ``E2EError`` or ``ClusterError`` if there is no usable cluster."""
        self.settings = Settings.parse(environ)
        shutil.rmtree(self.out / "failures", ignore_errors=True)
        if self.settings.theirs is not None:
            self.target = self._open.enter_context(their_cluster(self.settings.theirs, progress))
        else:
            self.target = self._open.enter_context(own_cluster(progress, keep=self.settings.keep))
        progress.say(f"==> scenarios run on {self.target.name}")
        pull_everywhere(self.target.kube, self.target.nodes(), self.target.engine_image, progress)

    def close(self) -> None:
        self._open.close()

    @property
    def keep(self) -> bool:
        return self.settings is not None and self.settings.keep

    def report(self, test_id: str) -> Report:
        return self.reports.setdefault(test_id, Report(scenario=scenario_name(test_id)))

    @contextmanager
    def space(self, name: str, kube: Kube, operator_log: Words) -> Iterator[Space]:
        """Provide a namespace while the context lasts."""
        space = Space(kube, f"e2e-{slug(name)[:_NAME]}-{uuid.uuid4().hex[:4]}", operator_log=operator_log)
        space.create()
        self.spaces.append(space)
        try:
            yield space
        finally:
            self.spaces.remove(space)
            space.delete()

    def keep_evidence(self, test_id: str, failure: str) -> Path | None:
        """Return the folder of the evidence, or None without a cluster. Scenarios with the same cause share it."""
        if self.target is None:
            return None
        if failure in self.evidence:
            return self.evidence[failure]
        folder = self.out / "failures" / slug(scenario_name(test_id))
        evidence.collect(self.target, folder, namespaces=[space.name for space in self.spaces], failure=failure)
        self.evidence[failure] = folder
        return folder

    def write(self) -> None:
        """Write results.json and the figures in Markdown."""
        assert self.target is not None
        self.out.mkdir(parents=True, exist_ok=True)
        reports = list(self.reports.values())
        document = results.document(
            reports, cluster=self.target.name, started=self.started.isoformat(timespec="seconds")
        )
        (self.out / "results.json").write_text(json.dumps(document, indent=2) + "\n")
        (self.out / "promises.md").write_text(results.markdown(reports))

    @property
    def seconds(self) -> float:
        return time.time() - self.started.timestamp()
