"""The login for a registry: the user and password that `docker login` or a pull secret stores.

For ``registry``. DOCKER_AUTH_CONFIG contains the content of such a file (in pods: the secret of the spec). Without it,
REGISTRY_AUTH_FILE, DOCKER_CONFIG/config.json and ~/.docker/config.json are read, and the credential helpers that they
name are run.
"""

import json
import subprocess
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire_engine.errors import FetchError

_HELPER_SECONDS = 30
_DOCKER_HUB = ("docker.io", "registry-1.docker.io", "index.docker.io", "https://index.docker.io/v1/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    user: str
    password: str = field(repr=False)
    is_identity_token: bool = False
    """True if the password must be exchanged for a token."""


def find_login(registry: str, environ: Mapping[str, str]) -> Login | None:
    """Return the login for this registry, or None. Raise FetchError for a file that cannot be read."""
    for where, body in _configurations(environ):
        found = _from_auths(registry, body, where) or _from_helper(registry, body)
        if found is not None:
            return found
    return None


def _configurations(environ: Mapping[str, str]) -> list[tuple[str, Mapping[str, object]]]:
    if text := environ.get("DOCKER_AUTH_CONFIG"):
        return [("DOCKER_AUTH_CONFIG", _parsed(text, "DOCKER_AUTH_CONFIG"))]
    folder = environ.get("DOCKER_CONFIG")
    paths = [
        *([Path(chosen)] if (chosen := environ.get("REGISTRY_AUTH_FILE")) else []),
        (Path(folder) if folder else Path(environ.get("HOME", "/nonexistent")) / ".docker") / "config.json",
    ]
    found: list[tuple[str, Mapping[str, object]]] = []
    for path in paths:
        try:
            found.append((str(path), _parsed(path.read_text(encoding="utf-8"), str(path))))
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise FetchError(f"{path} cannot be read: {error}") from error
    return found


def _parsed(text: str, where: str) -> Mapping[str, object]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FetchError(f"{where} is not JSON, as `docker login` writes it: {error}") from error
    if not isinstance(body, Mapping):
        raise FetchError(f"{where} is not a JSON object, as `docker login` writes it")
    return body


def _names(registry: str) -> list[str]:
    names = list(_DOCKER_HUB) if registry in _DOCKER_HUB else [registry]
    return [*names, *(f"https://{name}" for name in names), *(f"https://{name}/" for name in names)]


def _from_auths(registry: str, body: Mapping[str, object], where: str) -> Login | None:
    auths = body.get("auths")
    if not isinstance(auths, Mapping):
        return None
    entry = next((auths[name] for name in _names(registry) if isinstance(auths.get(name), Mapping)), None)
    if not entry:
        return None
    if token := entry.get("identitytoken"):
        return Login(user="", password=str(token), is_identity_token=True)
    user, password = entry.get("username"), entry.get("password")
    if isinstance(user, str) and isinstance(password, str):
        return Login(user=user, password=password)
    try:
        user, separator, password = b64decode(str(entry["auth"]), validate=True).decode().partition(":")
    except (KeyError, ValueError):
        raise FetchError(f"{where} has an entry for {registry} without a readable user and password") from None
    return Login(user=user, password=password.rstrip("\0")) if separator else None


def _from_helper(registry: str, body: Mapping[str, object]) -> Login | None:
    helpers = body.get("credHelpers")
    own = helpers.get(registry) if isinstance(helpers, Mapping) else None
    name = own or body.get("credsStore")
    if not isinstance(name, str) or "/" in name:
        return None
    server = _DOCKER_HUB[-1] if registry in _DOCKER_HUB else registry
    try:
        done = subprocess.run(
            [f"docker-credential-{name}", "get"],
            input=server,
            capture_output=True,
            text=True,
            timeout=_HELPER_SECONDS,
            check=True,
        )
        said = json.loads(done.stdout)
        user, secret = str(said["Username"]), str(said["Secret"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None  # The helper has no login for this registry, which is then accessed without one.
    return Login(user=user, password=secret, is_identity_token=user == "<token>")
