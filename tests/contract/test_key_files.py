"""One Secret with keys may serve gateway and engines: both read the same file the same way."""

import hashlib

from hypothesis import example, given
from hypothesis import strategies as st

from quire_engine.errors import KeyFileError
from quire_engine.server.auth import keys as engine
from quire_gateway import keys as gateway
from quire_gateway.errors import ConfigProblem

HEX = hashlib.sha256(b"sk-0123456789").hexdigest()
WORDS = (
    *("sk-0123456789", "short", "é" * 9, f"sha256:{HEX}", "sha256:12", f"sha256:{HEX}0", "team-a:sk-0123456789"),
    *(f"team-a:sha256:{HEX}", "team-a:sha256:12", ":sk-0123456789", "#comment", "# comment", "name=team-a", "name="),
    *("requests_per_minute=10", "tokens_per_minute=0", "max_concurrent=2", "limit=3", "a=b=c=d=e"),
    *("tenant=sk-0123456789", "c2stMDEyMzQ1Njc4OQ==", "SK=sk-0123456789"),
)
LINES = st.lists(st.sampled_from(WORDS), max_size=3).map(" ".join)


def digests(text: str) -> set[bytes] | None:
    """What the engine takes for keys; None where it refuses the file."""
    try:
        return {key.digest for key in engine.parse_keys(text, "keys")}
    except KeyFileError:
        return None


@given(st.lists(LINES, max_size=2).map("\n".join))
@example(f"# team a\n\n  name=team-a requests_per_minute=600 sha256:{HEX}  \n")
def test_what_the_engine_takes_for_keys_the_gateway_takes_too(text: str) -> None:
    expected = digests(text)
    try:
        found = set(gateway.parse_keys(text, "keys"))
    except ConfigProblem:
        # Only the engine knows what names and limits mean, so it may refuse more, and nothing that is left out here.
        assert expected is None
    else:
        assert expected in (None, found)


def test_keys_are_found_in_either() -> None:
    text = f"sk-9876543210\nname=team-a requests_per_minute=10 sha256:{HEX}\nteam-b:sk-55555555\n"
    assert digests(text) == set(gateway.parse_keys(text, "keys")) and len(digests(text) or ()) == 3
