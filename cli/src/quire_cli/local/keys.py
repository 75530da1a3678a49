"""Where ``quire up`` finds the API keys that ``spec.auth`` asks for: there are no secrets on a laptop, so in a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from quire_cli.errors import SpecProblem
from quire_operator.domain.resource import Spec

VARIABLE = "QUIRE_API_KEY_FILE"
_HINT = "put the keys into a file, one a line, and start with QUIRE_API_KEY_FILE=FILE; or remove spec.auth"


def key_file(spec: Spec, environ: Mapping[str, str]) -> str | None:
    """The file for this one's engines; None where it asks for no keys."""
    return None if spec.auth_secret is None else str(Path(environ[VARIABLE]).resolve())


def check_key_file(specs: Sequence[Spec], environ: Mapping[str, str]) -> None:
    """Raises ``SpecProblem`` where keys are asked for and there is no file of them."""
    asking = [spec for spec in specs if spec.auth_secret is not None]
    if not asking:
        return
    who = f"{asking[0].name}: spec.auth names the secret {asking[0].auth_secret}"
    name = environ.get(VARIABLE)
    if not name:
        raise SpecProblem(f"{who}, and there are no secrets outside a cluster", hint=_HINT)
    try:
        Path(name).read_bytes()
    except OSError as error:
        raise SpecProblem(f"{who}; {VARIABLE}={name} can't be read: {error.strerror}", hint=_HINT) from error
