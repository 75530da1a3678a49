"""Programs of Debian packages, with a script instead of apt-get."""

from pathlib import Path

import pytest

from quire_cluster import debian
from quire_cluster.errors import BinaryUnavailable


@pytest.mark.parametrize(
    ("script", "why"), [("exec sleep 600", "had not ended after"), ("echo no route; exit 1", "no route")]
)
def test_download_without_success_names_the_package(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("apt-get", "dpkg-deb"):
        (tmp_path / program).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(debian, "_SECONDS", 0.5)
    with pytest.raises(BinaryUnavailable, match=rf"(?s)some-package is needed .*{why}.*apt-get install some-package"):
        debian.debian_programs("some-package", ["some-program"])
    assert list((tmp_path / "cache" / "quire").iterdir()) == []
