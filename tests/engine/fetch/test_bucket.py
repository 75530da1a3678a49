"""s3://: objects become a folder, verified and resumed; messages for errors of the store."""

import asyncio
import hashlib
import os
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from botocore.exceptions import ClientError
from fetch_support.faulty_proxy import Canned, FaultyProxy
from fetch_support.hub_stub import serving
from fetch_support.model import CONFIG, ELEMENTS

from quire_common.model_source import BucketSource
from quire_engine.errors import FetchError
from quire_engine.fetch.bucket import BucketOrigin
from quire_engine.fetch.bucket_errors import Where, explained, of_answer
from quire_engine.fetch.remote_files import Answer, Unreachable

Fetch = Callable[..., Awaitable[Path]]
OWNER = "AWS4-HMAC-SHA256 Credential=OWNER/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


def put(server: str, key: str, data: bytes, **headers: str) -> None:
    names = {"Authorization": OWNER} | {name.replace("_", "-"): value for name, value in headers.items()}
    httpx.put(f"{server}/models/{key}", content=data, headers=names).raise_for_status()


@pytest.fixture
def prefix(s3_server: str, bucket: FaultyProxy, model: dict[str, bytes], tmp_path: Path) -> str:
    """Return the prefix of this test's model, which contains also files that an engine does not read."""
    prefix = f"team/{tmp_path.name}"
    for name, data in model.items():
        put(s3_server, f"{prefix}/{name}", data)
    put(s3_server, f"{prefix}/pytorch_model.bin", b"a pickle")
    put(s3_server, f"{prefix}/modeling.py", b"code")
    put(s3_server, f"{prefix}/original/consolidated.safetensors", b"other weights")
    put(s3_server, f"{prefix}/", b"")
    return prefix


async def test_the_objects_below_a_prefix_become_a_folder(
    prefix: str, fetch: Fetch, model: dict[str, bytes], bucket: FaultyProxy
) -> None:
    folder = await fetch(f"s3://models/{prefix}/")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == model
    bucket.seen.clear()
    assert await fetch(f"s3://models/{prefix}") == folder
    assert not bucket.ranges(".safetensors"), "what is here is not fetched again"


async def test_replaced_object_gives_another_version(
    prefix: str, fetch: Fetch, s3_server: str, bucket: FaultyProxy
) -> None:
    first = await fetch(f"s3://models/{prefix}")
    put(s3_server, f"{prefix}/tokenizer.json", b'{"new": 1}')
    second = await fetch(f"s3://models/{prefix}")
    assert first != second and (second / "tokenizer.json").read_bytes() == b'{"new": 1}'
    assert (first / "tokenizer.json").read_bytes() == b"{}", "readers of the old version may continue"


async def test_download_resumes_only_if_the_object_is_unchanged(
    prefix: str, fetch: Fetch, bucket: FaultyProxy, model: dict[str, bytes]
) -> None:
    bucket.cut["model.safetensors"] = 2_000_000
    folder = await fetch(f"s3://models/{prefix}")
    assert (folder / "model.safetensors").read_bytes() == model["model.safetensors"]
    first, second = bucket.ranges("model.safetensors")
    assert first == "" and second.startswith("bytes=1") and int(second[6:-1]) <= 2_000_000


async def test_object_replaced_during_a_download_is_not_mixed(prefix: str, fetch: Fetch, bucket: FaultyProxy) -> None:
    bucket.canned["GET /models/" + prefix + "/model.safetensors"] = Canned(412)
    with pytest.raises(FetchError, match="model.safetensors of s3://models/.* was replaced meanwhile"):
        await fetch(f"s3://models/{prefix}")


async def test_download_requires_the_listed_entity_tag(prefix: str, bucket: FaultyProxy) -> None:
    origin = BucketOrigin(BucketSource(bucket="models", prefix=prefix))
    (weights,) = (file for file in origin.listing().files if file.name == "model.safetensors")
    request = origin.request(weights)
    assert request.headers == {"If-Match": weights.tag} and "X-Amz-Signature=" in request.url
    assert httpx.get(request.url, headers={"If-Match": '"another"'}).status_code == 412


@pytest.mark.parametrize("checksum", ["an entity tag", "an uploader's SHA-256"])
async def test_damaged_object_is_rejected_and_downloaded_again(
    checksum: str, prefix: str, fetch: Fetch, bucket: FaultyProxy, s3_server: str, model: dict[str, bytes]
) -> None:
    if checksum != "an entity tag":
        digest = b64encode(hashlib.sha256(model["model.safetensors"]).digest()).decode()
        put(
            s3_server,
            f"{prefix}/model.safetensors",
            model["model.safetensors"],
            x_amz_checksum_sha256=digest,
            x_amz_sdk_checksum_algorithm="SHA256",
            x_amz_server_side_encryption="aws:kms",
        )
    bucket.damaged.add("model.safetensors")
    algorithm = "MD5" if checksum == "an entity tag" else "SHA-256"
    with pytest.raises(FetchError, match=f"model.safetensors of s3://.* arrived damaged: its {algorithm}"):
        await fetch(f"s3://models/{prefix}")
    bucket.damaged.clear()
    folder = await fetch(f"s3://models/{prefix}")
    assert (folder / "model.safetensors").read_bytes() == model["model.safetensors"]


async def test_object_longer_than_listed_does_not_fill_the_disk(
    prefix: str, fetch: Fetch, bucket: FaultyProxy, model: dict[str, bytes]
) -> None:
    listed = len(model["model.safetensors"])
    bucket.canned[f"GET /models/{prefix}/model.safetensors"] = Canned(200, "x" * (listed + (20 << 20)))
    with pytest.raises(FetchError, match="arrived damaged: it has") as caught:
        await fetch(f"s3://models/{prefix}")
    found = re.search(r"it has (\d+) bytes", str(caught.value))
    assert found is not None and int(found[1]) < listed + (2 << 20)


async def test_redirect_loop_ends_the_download(prefix: str, fetch: Fetch, bucket: FaultyProxy) -> None:
    path = f"/models/{prefix}/model.safetensors"
    bucket.canned[f"GET {path}"] = Canned(307, "", {"Location": path})
    with pytest.raises(FetchError, match="cannot be reached for .*redirects"):
        await fetch(f"s3://models/{prefix}")


def test_entity_tag_of_a_multipart_upload_is_not_a_digest(s3_server: str, bucket: FaultyProxy, prefix: str) -> None:
    put(s3_server, f"{prefix}/config.json", b"{}", x_amz_server_side_encryption="aws:kms")
    files = BucketOrigin(BucketSource(bucket="models", prefix=prefix)).listing().files
    assert {file.name: file.checksum is None for file in files} == {
        "config.json": True,
        "model.safetensors": False,
        "tokenizer.json": False,
    }


def test_plan_reads_the_configuration_and_headers_of_weights(prefix: str, bucket: FaultyProxy) -> None:
    found = BucketOrigin(BucketSource(bucket="models", prefix=prefix)).describe()
    assert (found.parameters, found.config) == (ELEMENTS, CONFIG)
    assert bucket.ranges("model.safetensors") == ["bytes=0-131071"]


def error(code: str, message: str = "said so", **more: str) -> str:
    fields = {"Code": code, "Message": message} | more
    return f"<Error>{''.join(f'<{name}>{text}</{name}>' for name, text in fields.items())}</Error>"


REFUSALS = {
    "no such bucket": (404, error("NoSuchBucket"), "has no bucket models", "check its name"),
    "not allowed": (403, error("AccessDenied"), "credentials may not read s3://models/", "s3:GetObject"),
    "an unknown key": (403, error("InvalidAccessKeyId"), "does not know the credentials", "AWS_ACCESS_KEY_ID"),
    "a wrong secret": (403, error("SignatureDoesNotMatch"), "does not know the credentials", "AWS_ACCESS_KEY_ID"),
    "an old token": (400, error("ExpiredToken"), "have expired", "get new ones"),
    "a wrong clock": (403, error("RequestTimeTooSkewed"), "refuses the time of this machine", "set its clock"),
    "another region": (
        400,
        error("AuthorizationHeaderMalformed", Region="eu-west-1"),
        "is in another region than the requested one",
        "?region=",
    ),
    "an archive": (403, error("InvalidObjectState"), "is in an archive", "restore it"),
    "anything else": (409, error("OperationAborted"), r"refused s3://models/.* \(OperationAborted: said so\)", None),
}


@pytest.mark.parametrize(("status", "body", "message", "hint"), REFUSALS.values(), ids=REFUSALS.keys())
def test_store_error_is_reported_with_a_remedy(status: int, body: str, message: str, hint: str | None) -> None:
    """The AWS library and the transfer report errors with the same messages."""
    where = Where(source=BucketSource(bucket="models", prefix="m"), endpoint="store.example", anonymous=False)
    told = {name: text for name, text in re.findall("<(Code|Message|Region)>([^<]*)<", body)}
    headers = {"x-amz-bucket-region": told.get("Region")}
    response = {"Error": told, "ResponseMetadata": {"HTTPHeaders": headers}}
    with pytest.raises(FetchError, match=message) as caught, explained(lambda: where):
        raise ClientError(response, "ListObjectsV2")
    answer = Answer(status=status, body=body.encode(), headers={})
    problem = of_answer(answer, where, key="")
    assert problem is not None and problem.message == caught.value.message
    assert problem.hint == caught.value.hint
    assert hint is None or (problem.hint is not None and hint in problem.hint)


@pytest.mark.parametrize("code", ["SlowDown", "ServiceUnavailable", "InternalError"])
def test_transient_store_errors_are_retried(code: str) -> None:
    where = Where(source=BucketSource(bucket="models", prefix="m"), endpoint="store.example", anonymous=False)
    assert of_answer(Answer(status=503, body=error(code).encode(), headers={}), where, key="k") is None
    with pytest.raises(Unreachable, match="store.example does not serve s3://models/m now"), explained(lambda: where):
        raise ClientError({"Error": {"Code": code}}, "ListObjectsV2")


@pytest.mark.parametrize("when", ["GET /models", "HEAD .*", "GET .*"])
async def test_access_denied_raises_a_fetch_error(when: str, prefix: str, fetch: Fetch, bucket: FaultyProxy) -> None:
    end = when.replace(".*", f"/models/{prefix}/model.safetensors")
    bucket.canned[end] = Canned(403, "" if when.startswith("HEAD") else error("AccessDenied"))
    with pytest.raises(FetchError, match="credentials may not read s3://models/"):
        await fetch(f"s3://models/{prefix}")


async def test_empty_prefix_names_the_folders_that_exist(prefix: str, fetch: Fetch, bucket: FaultyProxy) -> None:
    with pytest.raises(FetchError, match=r"s3://models/team has no files, but it has folders: .*/"):
        await fetch("s3://models/team")
    with pytest.raises(FetchError, match="s3://models/nowhere has no files"):
        await fetch("s3://models/nowhere")
    with pytest.raises(FetchError, match="has no safetensors weights"):
        await fetch(f"s3://models/{prefix}/original")
    with pytest.raises(FetchError, match="has no bucket wrong-name"):
        await fetch("s3://wrong-name/llama")


async def test_private_bucket_without_credentials_is_an_error(
    prefix: str,
    fetch: Fetch,
    bucket: FaultyProxy,
    s3_server: str,
    model: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, data in model.items():
        put(s3_server, f"{prefix}/{name}", data, x_amz_acl="public-read")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert (await fetch(f"s3://models/{prefix}") / "config.json").exists()
    bucket.canned["GET /models"] = Canned(403, error("AccessDenied"))
    with pytest.raises(FetchError, match="no credentials were found, and .* is not public") as caught:
        await fetch(f"s3://models/{prefix}/x")
    assert caught.value.hint is not None and "spec.model.credentials" in caught.value.hint


async def test_access_key_without_secret_is_reported(
    prefix: str, fetch: Fetch, bucket: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(FetchError, match="no credentials for s3://models/"):
        await fetch(f"s3://models/{prefix}")


async def test_web_identity_token_is_exchanged_for_credentials(
    prefix: str, fetch: Fetch, bucket: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The environment has only the token's file and the role, as with the role of a service account."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "token").write_text("eyJhbGciOiJSUzI1NiJ9.e30.c2lnbmVk")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/models")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    await fetch(f"s3://models/{prefix}")
    assert ("POST", "/", "") in bucket.seen, "the token service was asked"
    assert not bucket.canned


async def test_store_of_the_source_replaces_the_environments(
    prefix: str, fetch: Fetch, bucket: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert (await fetch(f"s3://models/{prefix}?endpoint={address}&region=here") / "config.json").exists()


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
async def test_adapter_from_the_store_of_the_credentials_is_signed(
    prefix: str, fetch: Fetch, bucket: FaultyProxy, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    address = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(variable, address)
    assert (await fetch(f"s3://models/{prefix}?endpoint={address}/", of_adapter=True) / "config.json").exists()
    assert (await fetch(f"s3://models/{prefix}", of_adapter=True) / "config.json").exists()


@pytest.mark.parametrize("own", ["http://127.0.0.1:9", None])
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (409, error("CODE", "password=hunter2", Region="hunter2")),
        (403, error("AccessDenied", "password=hunter2")),
        (400, error("AuthorizationHeaderMalformed", "password=hunter2", Region="hunter2")),
        (404, error("hunter2")),
        (200, "password=hunter2"),
    ],
)
async def test_author_of_an_adapter_cannot_choose_where_credentials_go(
    own: str | None, status: int, body: str, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session")
    if own is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", own)
    other = Internal(status, body)
    with serving(other) as address:
        source = f"s3://models/x?endpoint={address}"
        with pytest.raises(FetchError) as caught:
            await fetch(source, of_adapter=True)
        sent = "".join(other.seen)
        assert sent and not re.search("AKIA|session|signature", sent, re.IGNORECASE)
        assert "hunter2" not in f"{caught.value} {caught.value.hint}"
        other.seen.clear()
        with pytest.raises(FetchError):
            await fetch(source)
        assert "AKIA" in "".join(other.seen), "the author of a spec may use the credentials"


class Internal:
    """A server that an adapter's author can name and that answers everything alike."""

    def __init__(self, status: int, body: str) -> None:
        self.status, self.body, self.seen = status, body, list[str]()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        return app

    async def answer(self, request: web.Request) -> web.Response:
        self.seen += [request.path_qs, *(f"{name}: {value}" for name, value in request.headers.items())]
        return web.Response(status=self.status, text=self.body, headers={"x-amz-bucket-region": "hunter2"})


async def test_unreachable_store_is_named_and_cached_files_serve(
    prefix: str, fetch: Fetch, bucket: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await fetch(f"s3://models/{prefix}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("quire_engine.fetch.bucket.ATTEMPTS", 1)
    said: list[str] = []
    assert await fetch(f"s3://models/{prefix}", say=said.append) == folder
    assert "127.0.0.1:9 cannot be reached" in said[0] and "using what was fetched before" in said[0]
    with pytest.raises(FetchError, match="127.0.0.1:9 cannot be reached for s3://models/other"):
        await fetch("s3://models/other")


async def test_stalled_store_does_not_delay_cancellation(bucket: FaultyProxy, fetch: Fetch) -> None:
    bucket.stall_after["/models"] = 0
    fetching = asyncio.ensure_future(fetch("s3://models/x"))
    while not bucket.seen:
        await asyncio.sleep(0.01)
    fetching.cancel()
    async with asyncio.timeout(10):  # the library itself waits twenty seconds
        with pytest.raises(asyncio.CancelledError):
            await fetching


def test_aws_library_is_imported_only_for_buckets() -> None:
    code = "import sys, quire_cli.local.up; print([n for n in ('botocore', 'huggingface_hub') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
