"""Keys without a cluster: a file that the environment names, or an error that names the variable."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from specs import valid_spec

from quire_cli.errors import SpecProblem
from quire_cli.local.deployment import check_key_file, key_file

KEYED = {"auth": {"secretName": "team-keys"}}


def test_key_file_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("a-key-of-mine")
    environ = {"QUIRE_API_KEY_FILE": "keys"}
    check_key_file([valid_spec(), valid_spec(**KEYED)], environ)
    assert key_file(valid_spec(**KEYED), environ) == str(tmp_path / "keys")
    assert key_file(valid_spec(), environ) is None, "it is open to all, whatever the environment holds"


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, "there are no Secrets outside a cluster"),
        ({"QUIRE_API_KEY_FILE": ""}, "there are no Secrets outside a cluster"),
        ({"QUIRE_API_KEY_FILE": "/no/such"}, "QUIRE_API_KEY_FILE=/no/such cannot be read: No such file"),
    ],
)
def test_missing_key_file_is_an_error_with_a_hint(environ: Mapping[str, str], says: str) -> None:
    check_key_file([valid_spec()], environ)
    with pytest.raises(SpecProblem) as caught:
        check_key_file([valid_spec(), valid_spec(**KEYED)], environ)
    assert caught.value.message.startswith("chat: spec.auth names the Secret team-keys")
    assert says in caught.value.message and "QUIRE_API_KEY_FILE=FILE" in str(caught.value.hint)
