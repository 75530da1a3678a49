"""The choice between generating and pooling, from the flags and from the files of the model's folder.

sentence-transformers writes ``modules.json`` with the modules after the decoder, each with a folder of its own: Pooling
and Normalize of an embedding model, LogitScore of a reranker. Rerankers without them can be served with vLLM's override
``classifier_from_token``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quire_common.flags.table import FlagValues
from quire_engine.config import EngineConfig, PoolerOptions, PoolingSetup
from quire_engine.errors import ModelFolderError
from quire_engine.model_folder import read_config, read_json_array, read_json_object

_TYPES = {"LAST": False, "MEAN": True}
"""The types of pooling by vLLM's names; the value says whether it is the mean."""
_TYPE_KEYS = ("pooling_type", "seq_pooling_type")
_NORMALIZE_KEYS = ("normalize", "use_activation")
"""Each the newer and the older name of the same key in vLLM."""
_MODES = {"lasttoken": False, "mean": True}
_OLD_MODES = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean"}
_SUPPORTED = "the last token and the mean of all tokens are supported"
_MODULES = "modules.json"
_IGNORED_MODULES = ("Transformer",)


# --- flags ---


def pooler_problems(values: FlagValues) -> Iterator[str]:
    """Yield what is wrong with the flags of pooling."""
    given = values["pooler-config"]
    if given is not None and values["runner"] == "generate":
        yield "--pooler-config and --runner generate contradict each other: remove one of them"
    for key, value in (given or {}).items():
        if key in _TYPE_KEYS:
            if not isinstance(value, str) or value.upper() not in _TYPES:
                yield f"--pooler-config {key}: {value!r} is not supported; the types are {', '.join(_TYPES)}"
        elif key in _NORMALIZE_KEYS:
            if not isinstance(value, bool):
                yield f"--pooler-config {key}: {value!r} is neither true nor false"
        else:
            known = ", ".join((*_TYPE_KEYS, *_NORMALIZE_KEYS))
            yield f"--pooler-config {key}: is not known here; the keys are {known}"


def pooler_options(values: FlagValues) -> PoolerOptions:
    """Return the options; ``pooler_problems`` has found no problem."""
    given: Mapping[str, Any] = values["pooler-config"] or {}
    kind = next((given[key] for key in _TYPE_KEYS if isinstance(given.get(key), str)), None)
    return PoolerOptions(
        runner=values["runner"],
        mean=None if kind is None else _TYPES.get(kind.upper()),
        normalize=next((given[key] for key in _NORMALIZE_KEYS if key in given), None),
    )


# --- the model's folder ---


def find_pooling(config: EngineConfig) -> PoolingSetup | None:
    """Return what the engine serves in the place of text; None if it generates. Raise ModelFolderError.

    The model's folder must be on this machine.
    """
    options, folder = config.pooler, config.model.path
    if options.runner == "generate":
        return None
    raw = read_config(folder, config.model.overrides)
    size = partial(_hidden_size, folder, raw)  # not every model that generates states it in this form
    found = _of_modules(folder, size) or _of_config(folder, raw, size)
    if found is None and options.runner == "auto":
        if options.mean is not None or options.normalize is not None:
            raise ModelFolderError(
                f"--pooler-config: {folder} generates text; add --runner pooling to serve embeddings of it"
            )
        return None
    setup = found or PoolingSetup(hidden_size=size())
    return replace(
        setup,
        mean=setup.mean if options.mean is None else options.mean,
        normalize=setup.normalize if options.normalize is None else options.normalize,
        dimensions=_dimensions(folder, raw),
    )


def _of_config(folder: Path, raw: Mapping[str, Any], size: Callable[[], int]) -> PoolingSetup | None:
    """Return the setup that config.json implies."""
    tokens = raw.get("classifier_from_token")
    if tokens is not None:
        if not isinstance(tokens, list) or len(tokens) != 2 or not all(isinstance(one, str) and one for one in tokens):
            raise ModelFolderError(
                f"{folder}: classifier_from_token is {tokens!r}; expected the two tokens of irrelevant and of relevant "
                'documents, such as ["no", "yes"]'
            )
        return PoolingSetup(hidden_size=size(), task="score", no_token=tokens[0], yes_token=tokens[1])
    names = raw.get("architectures")
    if isinstance(names, list) and names and all(isinstance(name, str) and _has_no_lm_head(name) for name in names):
        return PoolingSetup(hidden_size=size())
    return None


def _has_no_lm_head(architecture: str) -> bool:
    """Return whether the name is one of a decoder alone, such as Qwen3Model; GPT2LMHeadModel is not."""
    return architecture.endswith("Model") and not architecture.endswith("LMHeadModel")


def _of_modules(folder: Path, size: Callable[[], int]) -> PoolingSetup | None:
    """Return the setup that sentence-transformers' modules describe; None for a folder without them."""
    found: PoolingSetup | None = None
    normalize = False
    for module in read_json_array(folder / _MODULES):
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind in ("Pooling", "LogitScore"):
            file = folder / str(module.get("path", "")) / "config.json"
            found = _of_pooling(file, size) if kind == "Pooling" else _of_logit_score(file, size)
        elif kind == "Normalize":
            normalize = True
        elif kind not in _IGNORED_MODULES:
            raise ModelFolderError(
                f"{folder / _MODULES}: the module {kind or module!r} is not supported; Pooling, Normalize and "
                "LogitScore are"
            )
    if found is None or found.task == "score":
        return found
    return PoolingSetup(hidden_size=size(), mean=found.mean, normalize=normalize)


def _of_pooling(file: Path, size: Callable[[], int]) -> PoolingSetup:
    content = read_json_object(file)
    mode = content.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else mode
    if modes is None:
        modes = [_OLD_MODES.get(name, name) for name, on in content.items() if name.startswith("pooling_mode_") and on]
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _MODES:
        shown = ", ".join(map(str, modes)) if isinstance(modes, list) and modes else "none"
        raise ModelFolderError(f"{file}: the pooling {shown} is not supported; {_SUPPORTED}")
    return PoolingSetup(hidden_size=size(), mean=_MODES[modes[0]])


def _of_logit_score(file: Path, size: Callable[[], int]) -> PoolingSetup:
    content = read_json_object(file)
    yes, no = content.get("true_token_id"), content.get("false_token_id")
    if type(yes) is not int or (no is not None and type(no) is not int):
        raise ModelFolderError(f"{file}: true_token_id is {yes!r} and false_token_id {no!r}; expected token ids")
    return PoolingSetup(hidden_size=size(), task="score", yes_token=yes, no_token=no)


def _hidden_size(folder: Path, raw: Mapping[str, Any]) -> int:
    text = raw.get("text_config")
    size = (text if isinstance(text, dict) and "hidden_size" in text else raw).get("hidden_size")
    if type(size) is not int or size < 1:
        raise ModelFolderError(f"{folder}: hidden_size is {size!r}; expected a whole number of at least 1")
    return size


def _dimensions(folder: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    given = raw.get("matryoshka_dimensions")
    if given is None:
        return ()
    if not isinstance(given, list) or not all(type(one) is int and one > 0 for one in given):
        raise ModelFolderError(f"{folder}: matryoshka_dimensions is {given!r}; expected numbers of dimensions")
    return tuple(sorted(given))
