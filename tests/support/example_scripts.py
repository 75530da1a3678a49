"""The modules of the scripts in examples/models, which are next to each other and not in a package."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"


@contextmanager
def example_modules(*names: str) -> Iterator[SimpleNamespace]:
    """Import these modules and yield them by their names. They can be imported within the context only."""
    sys.path.insert(0, str(MODELS))
    before = set(sys.modules)
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(MODELS))
        own = {path.stem for path in MODELS.glob("*.py")}
        for name in own & (sys.modules.keys() - before):
            del sys.modules[name]
