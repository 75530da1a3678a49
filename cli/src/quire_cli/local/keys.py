"""The API keys that ``spec.auth`` requires under ``quire up``: from a file, because there are no Secrets."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from quire_cli.errors import SpecProblem
from quire_operator.domain.resource import Spec

VARIABLE = "QUIRE_API_KEY_FILE"
_HINT = "write the keys to a file, one per line, and set QUIRE_API_KEY_FILE=FILE; or remove spec.auth"


def key_file(spec: Spec, environ: Mapping[str, str]) -> str | None:
    """Return the key file for the engines of this spec; None if it requires no keys."""
    return None if spec.auth_secret is None else str(Path(environ[VARIABLE]).resolve())


def check_key_file(specs: Sequence[Spec], environ: Mapping[str, str]) -> None:
    """Raise ``SpecProblem`` if keys are required and there is no key file."""
    asking = [spec for spec in specs if spec.auth_secret is not None]
    if not asking:
        return
    who = f"{asking[0].name}: spec.auth names the Secret {asking[0].auth_secret}"
    name = environ.get(VARIABLE)
    if not name:
        raise SpecProblem(f"{who}, and there are no Secrets outside a cluster", hint=_HINT)
    try:
        Path(name).read_bytes()
    except OSError as error:
        raise SpecProblem(f"{who}; {VARIABLE}={name} cannot be read: {error.strerror}", hint=_HINT) from error
