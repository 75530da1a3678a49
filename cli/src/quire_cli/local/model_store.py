"""Where a model is on this machine: a folder as it stands, or one fetched from elsewhere, once, into the cache.

For ``quire up`` and ``quire plan``; in a cluster the pods fetch for themselves. Every failure is a ModelProblem.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from quire_operator.adapters.fetch.remote_files import Progress, Say
from quire_operator.adapters.fetch.weights_header import NoWeights, count_parameters
from quire_operator.domain.capacity.model_config import ModelConfig, ModelFacts, parse_model_config
from quire_operator.domain.resource import ClaimSource, FileSource, RemoteSource, Source
from quire_operator.errors import ModelProblem


def cache_home(environ: Mapping[str, str]) -> Path:
    """Where downloads are kept: QUIRE_CACHE, else as the XDG Base Directory Specification says."""
    if chosen := environ.get("QUIRE_CACHE"):
        return Path(chosen).expanduser() / "models"
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quire" / "models"


class ModelStore:
    """Resolves the sources of one YAML file; ``beside`` is the folder that relative ones start from."""

    def __init__(self, *, beside: Path, cache: Path) -> None:
        self._beside, self._cache = beside, cache

    async def fetch(self, source: Source, *, progress: Progress, say: Say = lambda line: None) -> Path:
        """The folder with the model, downloaded if need be. Cancelling stops the download, which can go on later.

        ``say`` is told what a person should know of it, such as who is waited for.
        """
        if isinstance(source, RemoteSource):
            from quire_operator.adapters.fetch import model_cache, origins  # slow to import, and most runs need none

            manner = model_cache.Manner(say=say)
            origin = origins.origin_of(source)
            return await model_cache.fetch(source, origin, self._cache, progress=progress, manner=manner)
        return self._folder(source)

    def facts(self, source: Source, *, weights_needed: bool = True) -> ModelFacts:
        """What the model is, without its weights being here. Blocks on the network for one that lies elsewhere."""
        if not isinstance(source, RemoteSource):
            return folder_facts(self._folder(source), weights_needed=weights_needed)
        from quire_operator.adapters.fetch import model_cache, origins

        origin = origins.origin_of(source)
        whole = model_cache.Cache(self._cache, source.cache_name).remembered(source.reference)
        if whole is not None:
            return folder_facts(origin.model_folder(whole))
        found = origin.describe()
        config = _parsed(found.config, where=str(source))
        if found.parameters is None:
            return ModelFacts(config=config, parameters=config.parameters, counted=False)
        return ModelFacts(config=config, parameters=found.parameters, counted=True)

    def _folder(self, source: FileSource | ClaimSource) -> Path:
        if isinstance(source, ClaimSource):
            raise ModelProblem(
                f"{source} is a volume of a cluster, and this is none",
                hint="use hf://, s3://, oci:// or file:// here; kubectl apply the file to a cluster",
            )
        folder = self._beside / source.path if source.relative else Path(source.path)
        if not folder.is_dir():
            kind = "is a file, not a folder" if folder.exists() else "does not exist"
            beside = f" (relative to {self._beside})" if source.relative else ""
            raise ModelProblem(
                f"the model folder {folder.resolve()} {kind}",
                details=[f"spec.model.source: {source}{beside}"],
                hint="it must hold config.json, a tokenizer and safetensors weights",
            )
        return folder.resolve()


def folder_facts(folder: Path, *, weights_needed: bool = True) -> ModelFacts:
    """What the model in a folder is."""
    path = folder / "config.json"
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelProblem(f"{folder} holds no config.json", hint="a model folder is as the hub has it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelProblem(f"{path} can't be read as JSON: {error}") from error
    config = _parsed(body, where=str(path))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        if weights_needed:
            pickles = [*folder.glob("*.bin"), *folder.glob("*.pt*")]
            found = f"; {pickles[0].name} is a pickle, which can run code" if pickles else ""
            raise ModelProblem(f"{folder} holds no *.safetensors weights{found}", hint="convert them to safetensors")
        return ModelFacts(config=config, parameters=config.parameters, counted=False)
    return ModelFacts(config=config, parameters=sum(map(_count_parameters, files)), counted=True)


def _parsed(body: object, *, where: str) -> ModelConfig:
    if not isinstance(body, dict):
        raise ModelProblem(f"{where} is no model configuration: a mapping is needed")
    config = parse_model_config(body)
    if isinstance(config, tuple):
        raise ModelProblem(
            f"{where} does not describe a model quire knows how to measure",
            details=[str(problem) for problem in config],
        )
    return config


def _count_parameters(path: Path) -> int:
    """Elements of all tensors, from the file's header; checks that the file is as long as the header says."""
    try:
        with path.open("rb") as file:

            def read(start: int, size: int) -> bytes:
                file.seek(start)
                return file.read(size)

            return count_parameters(read, path.stat().st_size)
    except (OSError, NoWeights) as error:
        raise ModelProblem(
            f"{path} is no whole safetensors file: {error}", hint="download or convert the model again"
        ) from error
