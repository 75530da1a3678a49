"""Models on this machine: local folders as they are, and remote models in a cache that ``quire-fetch`` fills.

``quire up`` needs the files, ``quire plan`` only the configuration and the number of parameters. Every failure is a
ModelProblem.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from quire_cli.errors import ModelProblem
from quire_cli.local.machine import installed
from quire_cli.local.process import start_watched
from quire_common.contract.engine import FETCH_COMMAND
from quire_common.model_memory import ModelConfig, ModelFacts, parse_model_config
from quire_common.model_source import (
    NO_DOWNLOAD,
    UNPACK,
    ClaimSource,
    FileSource,
    HubSource,
    ImageSource,
    RemoteSource,
    Source,
    cached_model,
)
from quire_common.safetensors_header import NoWeights, count_parameters
from quire_operator.api import Spec

Progress = Callable[[int, int], None]
"""Receives the bytes that are here and the bytes in total."""
Say = Callable[[str], None]
"""Receives a line for the user."""
MODEL_FIELD, DRAFT_FIELD = "spec.model.source", "spec.engine.speculation.draft.source"
_MAX_LINE_BYTES = 1 << 20
_HUB_HINT = "check the spelling of org/name and the revision; for a private or gated model set HF_TOKEN"


def fetch(context: typer.Context) -> None:
    """Download a model from a hub or a bucket. Needs the engine, whose command quire-fetch it runs."""
    command = installed(FETCH_COMMAND)
    os.execv(command, [command, *context.args])


class ModelStore:
    """The models of one YAML file; relative sources start from ``base``."""

    def __init__(self, *, base: Path, cache: Path) -> None:
        self._base, self._cache = base, cache

    async def fetch(
        self, source: Source, *, progress: Progress, say: Say = lambda line: None, field: str = MODEL_FIELD
    ) -> Path:
        """Return the folder with the model, downloaded if necessary. A cancelled download is resumed by the next call.

        ``say`` receives what the user should know about it, such as another process that downloads the same model.
        ``field`` of the spec names the source, for messages.
        """
        if not isinstance(source, RemoteSource):
            return self._folder(source, field)
        # A session of its own: a Ctrl-C on the terminal is for this process, which ends the other.
        process = await start_watched(
            [installed(FETCH_COMMAND), str(source), "--cache", str(self._cache)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
        )
        assert process.stdout is not None and process.stderr is not None
        errors = asyncio.create_task(process.stderr.read())
        folder: Path | None = None
        try:
            async for line in process.stdout:
                match json.loads(line):
                    case {"done": int(done), "total": int(total)}:
                        progress(done, total)
                    case {"message": str(message)}:
                        say(message)
                    case {"folder": str(path)}:
                        folder = Path(path)
                    case {"error": error}:
                        raise _problem(error)
            await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        if folder is None:
            raise _broken(source, process.returncode, (await errors).decode(errors="replace"))
        return folder

    def facts(self, source: Source, *, weights_needed: bool = True, field: str = MODEL_FIELD) -> ModelFacts:
        """Return what is known about the model without its weights. Blocks on the network for a remote source."""
        if not isinstance(source, RemoteSource):
            return folder_facts(self._folder(source, field), weights_needed=weights_needed)
        cached = cached_model(self._cache, source)
        if cached is not None:
            return folder_facts(cached)
        if isinstance(source, HubSource):
            return asyncio.run(self._hub_facts(source))  # needs no engine
        command = [installed(FETCH_COMMAND), str(source), "--describe"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        match json.loads(done.stdout or "{}"):
            case {"config": body, "parameters": parameters}:
                config = _parsed(body, where=str(source))
                if parameters is None:
                    return ModelFacts(config=config, parameters=config.parameters, counted=False)
                return ModelFacts(config=config, parameters=int(parameters), counted=True)
            case {"error": error}:
                raise _problem(error)
        raise _broken(source, done.returncode, done.stderr)

    def draft_facts(self, spec: Spec) -> ModelFacts | None:
        """Return what is known about the draft model of a spec; None without one."""
        speculation = spec.engine.speculation
        if speculation is None or speculation.draft is None:
            return None
        weights_needed = not spec.engine.invents_weights
        return self.facts(speculation.draft.source, weights_needed=weights_needed, field=DRAFT_FIELD)

    async def fetch_draft(self, spec: Spec, *, progress: Progress, say: Say) -> tuple[Path, ModelFacts] | None:
        """Return the folder of the draft model and its facts; None without one.

        An optional model that is unavailable gives None too, and ``say`` receives the reason.
        """
        speculation = spec.engine.speculation
        if speculation is None or speculation.draft is None:
            return None
        try:
            folder = await self.fetch(speculation.draft.source, progress=progress, say=say, field=DRAFT_FIELD)
            return folder, folder_facts(folder, weights_needed=not spec.engine.invents_weights)
        except ModelProblem as error:
            if speculation.required:
                raise
            say(f"{spec.name} serves without its draft model {speculation.draft.source}: {error}")
            return None

    async def _hub_facts(self, source: HubSource) -> ModelFacts:
        from quire_operator.capacity.hub import HubFacts, ModelUnknown  # slow

        reader = HubFacts(os.environ.get("HF_ENDPOINT") or None, token=_hub_token(os.environ))
        try:
            return await reader.facts(source)
        except ModelUnknown as error:
            hint = "check the network and HF_ENDPOINT" if error.unreachable else _HUB_HINT
            raise ModelProblem(str(error), hint=hint) from error
        finally:
            await reader.aclose()

    def _folder(self, source: FileSource | ClaimSource | ImageSource, field: str) -> Path:
        if isinstance(source, ImageSource):
            raise ModelProblem(
                f"{field}: {source} {NO_DOWNLOAD}",
                hint=f"here {UNPACK} by file://, or use hf:// or s3://; kubectl apply the file to a cluster",
            )
        if isinstance(source, ClaimSource):
            raise ModelProblem(
                f"{source} is a volume of a cluster, and this machine is not a cluster",
                hint="use hf://, s3:// or file:// here; kubectl apply the file to a cluster",
            )
        folder = self._base / source.path if source.relative else Path(source.path)
        if not folder.is_dir():
            kind = "is a file, not a folder" if folder.exists() else "does not exist"
            where = f" (relative to {self._base})" if source.relative else ""
            raise ModelProblem(
                f"the model folder {folder.resolve()} {kind}",
                details=[f"{field}: {source}{where}"],
                hint="it must contain config.json, a tokenizer and safetensors weights",
            )
        return folder.resolve()


def _hub_token(environ: Mapping[str, str]) -> str | None:
    """Return the user's token, found where the hub's own tools keep it."""
    if token := environ.get("HF_TOKEN"):
        return token
    base = Path(environ["XDG_CACHE_HOME"]) if "XDG_CACHE_HOME" in environ else Path.home() / ".cache"
    home = Path(environ.get("HF_HOME") or base / "huggingface")
    try:
        return Path(environ.get("HF_TOKEN_PATH") or home / "token").read_text().strip() or None
    except OSError:
        return None


def _problem(error: Mapping[str, Any]) -> ModelProblem:
    return ModelProblem(error["message"], details=error["details"], hint=error["hint"])


def _broken(source: Source, code: int | None, errors: str) -> ModelProblem:
    return ModelProblem(f"{source}: {FETCH_COMMAND} ended with code {code}", details=errors.strip().splitlines()[-5:])


def folder_facts(folder: Path, *, weights_needed: bool = True) -> ModelFacts:
    """Return the facts about the model in a folder."""
    path = folder / "config.json"
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelProblem(
            f"{folder} contains no config.json", hint="use a folder with all files of a model on the hub"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelProblem(f"{path} cannot be read as JSON: {error}") from error
    config = _parsed(body, where=str(path))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        if weights_needed:
            pickles = [*folder.glob("*.bin"), *folder.glob("*.pt*")]
            found = f"; {pickles[0].name} is a pickle, which can run code" if pickles else ""
            raise ModelProblem(f"{folder} contains no *.safetensors weights{found}", hint="convert them to safetensors")
        return ModelFacts(config=config, parameters=config.parameters, counted=False)
    return ModelFacts(config=config, parameters=sum(map(_count_parameters, files)), counted=True)


def _parsed(body: object, *, where: str) -> ModelConfig:
    if not isinstance(body, dict):
        raise ModelProblem(f"{where} is not a model configuration: expected a JSON object")
    config = parse_model_config(body)
    if isinstance(config, tuple):
        raise ModelProblem(
            f"quire cannot compute the memory of the model in {where}",
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
            f"{path} is not a complete safetensors file: {error}", hint="download or convert the model again"
        ) from error
