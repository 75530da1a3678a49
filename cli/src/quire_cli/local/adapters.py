"""The LLMAdapters of a local run: the list that the engines of an LLMDeployment read."""

from collections.abc import Iterable
from pathlib import Path

from quire_cli.local.replicas import write_atomically
from quire_common.contract.adapters_file import AdapterEntry, render_adapters
from quire_common.model_source import FileSource, Source
from quire_operator.domain.resource import AdapterSpec


def local_source(source: Source, base: Path) -> str:
    """Return a source as an engine on this machine reads it; a relative folder starts at the manifest's."""
    if isinstance(source, FileSource) and source.relative:
        return str((base / source.path).resolve())
    return str(source)


def write_adapters(file: Path, adapters: Iterable[AdapterSpec], *, base: Path) -> None:
    """Write the list of adapters; ``base`` is the folder of the manifest."""
    entries = [
        AdapterEntry(name=each.served_name, source=local_source(each.source, base), placement=each.placement)
        for each in adapters
    ]
    write_atomically(file, render_adapters(entries))
