"""The JSON files of a model folder. Imported by both processes; needs nothing but the standard library."""

import json
from pathlib import Path
from typing import Any

from quire_engine.errors import ModelFolderError


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a file; {} where there is no file. Raises ModelFolderError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{file} holds {type(content).__name__}, not an object")
    return content
