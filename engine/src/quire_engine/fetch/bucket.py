"""s3:// as an ``Origin``: the objects of a bucket, with the AWS library's listing, credentials and signatures.

Region, endpoint, profile and credentials come from the usual places of AWS tools: the environment, the shared files, a
web identity, the role of the pod or the machine. Without any credentials the bucket is accessed as a public one. The
library signs a URL for each file, and ``transfer`` downloads it like any other.
"""

import hashlib
import json
import os
import ssl
from base64 import b64decode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import botocore.session
from botocore import UNSIGNED
from botocore.config import Config

from quire_common.model_source import BucketSource
from quire_common.safetensors_header import NoWeights, count_parameters
from quire_engine import __version__
from quire_engine.errors import FetchError
from quire_engine.fetch import bucket_errors
from quire_engine.fetch.bucket_errors import ATTEMPTS, Where, explained
from quire_engine.fetch.remote_files import (
    Algorithm,
    Answer,
    Checksum,
    FileRequest,
    Listing,
    ModelDescription,
    PlainFiles,
    RemoteFile,
    Unreachable,
    check_weights,
    is_wanted,
)

_ADDRESS_SECONDS = 3600
"""The time for which a signed URL can start a download; each attempt gets a new one."""
_ASK_AT_ONCE = 8
_MAX_SHOWN = 8
_DEFAULT_REGION = "us-east-1"


class BucketOrigin(PlainFiles):
    """The objects directly below a prefix."""

    def __init__(self, source: BucketSource, *, of_adapter: bool = False) -> None:
        """Send no credentials to another store than the environment's if the source is ``of_adapter``.

        Users who may write LLMAdapters may not read the credentials of the replicas that download them.
        """
        self._source, self._of_adapter = source, of_adapter
        self._where = Where(source=source, endpoint="S3", anonymous=False)

    def listing(self) -> Listing:
        with explained(lambda: self._where):
            objects = self._objects()
            with ThreadPoolExecutor(_ASK_AT_ONCE) as pool:
                files = tuple(pool.map(self._file, objects))
        check_weights(str(self._source), [file.name for file in files])
        parts = sorted((file.name, file.size_bytes, file.tag) for file in files)
        version = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]
        return Listing(model=str(self._source), version=version, files=files)

    def describe(self) -> ModelDescription:
        with explained(lambda: self._where):
            objects = {_name(entry): entry for entry in self._objects()}
            check_weights(str(self._source), list(objects))
            if "config.json" not in objects:
                raise FetchError(
                    f"{self._source} has no config.json", hint="the folder must have the layout of a model on a hub"
                )
            body = self._read(objects["config.json"]["Key"])
            weights = [entry for name, entry in objects.items() if name.endswith(".safetensors")]
            with ThreadPoolExecutor(_ASK_AT_ONCE) as pool:
                parameters = sum(pool.map(self._count, weights))
        try:
            config = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise FetchError(f"config.json of {self._source} cannot be read as JSON: {error}") from error
        return ModelDescription(config=config, parameters=parameters)

    def request(self, file: RemoteFile) -> FileRequest:
        parameters = {"Bucket": self._source.bucket, "Key": file.address}
        with explained(lambda: self._where):
            url = self._client.generate_presigned_url("get_object", Params=parameters, ExpiresIn=_ADDRESS_SECONDS)
        # Data that is already here belongs to this version of the object.
        return FileRequest(url=url, headers={"If-Match": file.tag} if file.tag else {})

    def refusal(self, file: RemoteFile, answer: Answer) -> FetchError | None:
        if answer.status == 412:
            return FetchError(f"{file.name} of {self._source} was replaced meanwhile", hint="run again")
        return bucket_errors.of_answer(answer, self._where, key=file.address)

    def unreachable(self, error: BaseException) -> Unreachable:
        return bucket_errors.unreachable(self._where, error)

    def trust(self) -> ssl.SSLContext | bool:
        chosen = os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE")
        return ssl.create_default_context(cafile=chosen) if chosen else True

    def _objects(self) -> list[dict[str, Any]]:
        """Return the objects that an engine reads. Raise FetchError if the prefix has no objects."""
        start = f"{self._source.prefix}/" if self._source.prefix else ""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._source.bucket, Prefix=start, Delimiter="/"
        )
        found: list[dict[str, Any]] = []
        folders: list[str] = []
        for page in pages:
            found += [entry for entry in page.get("Contents", ()) if entry["Key"] != start]
            folders += [entry["Prefix"].removeprefix(start) for entry in page.get("CommonPrefixes", ())]
        if not found:
            raise FetchError(
                f"{self._source} has no files{_shown(folders)}", hint="check the path; it must be a folder"
            )
        return [entry for entry in found if is_wanted(_name(entry))]

    def _file(self, entry: dict[str, Any]) -> RemoteFile:
        head = self._client.head_object(Bucket=self._source.bucket, Key=entry["Key"], ChecksumMode="ENABLED")
        return RemoteFile(
            name=_name(entry),
            size_bytes=head["ContentLength"],
            checksum=_checksum(head),
            address=entry["Key"],
            tag=head["ETag"],
        )

    def _count(self, entry: dict[str, Any]) -> int:
        try:
            return count_parameters(lambda start, size: self._read(entry["Key"], start, size), entry["Size"])
        except NoWeights as error:
            raise FetchError(f"{_name(entry)} of {self._source} is not a complete safetensors file: {error}") from error

    def _read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        part = {} if size is None else {"Range": f"bytes={start}-{start + size - 1}"}
        body: bytes = self._client.get_object(Bucket=self._source.bucket, Key=key, **part)["Body"].read()
        return body

    @cached_property
    def _client(self) -> Any:
        session = botocore.session.Session()
        is_foreign = self._of_adapter and self._source.endpoint is not None and not _is_own(self._source.endpoint)
        anonymous = is_foreign or session.get_credentials() is None
        # Pods get AWS_REGION, but the library itself reads AWS_DEFAULT_REGION.
        region = self._source.region or os.environ.get("AWS_REGION") or session.get_config_variable("region")
        config = Config(
            signature_version=UNSIGNED if anonymous else "s3v4",
            connect_timeout=10,
            read_timeout=20,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            user_agent_extra=f"quire/{__version__}",
        )
        client = session.create_client(
            "s3", region_name=region or _DEFAULT_REGION, endpoint_url=self._source.endpoint, config=config
        )
        endpoint = urlsplit(str(client.meta.endpoint_url)).netloc
        self._where = Where(source=self._source, endpoint=endpoint, anonymous=anonymous, is_foreign=is_foreign)
        return client


def _is_own(endpoint: str) -> bool:
    """Return True if an endpoint is the environment's store."""
    own = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return own is not None and endpoint.rstrip("/") == own.rstrip("/")


def _name(entry: dict[str, Any]) -> str:
    return str(entry["Key"]).rsplit("/", 1)[-1]


def _checksum(head: dict[str, Any]) -> Checksum | None:
    """Return the SHA-256 if the upload supplied one, else the MD5 if the entity tag is one, else None."""
    given = head.get("ChecksumSHA256")
    if given is not None and head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT" and "-" not in given:
        return Checksum(algorithm=Algorithm.SHA256, hex=b64decode(given).hex())
    tag = head["ETag"].strip('"')
    by_own_key = head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head
    is_digest = len(tag) == 32 and all(letter in "0123456789abcdef" for letter in tag)
    return Checksum(algorithm=Algorithm.MD5, hex=tag) if is_digest and not by_own_key else None


def _shown(folders: Sequence[str]) -> str:
    if not folders:
        return ""
    more = f" and {len(folders) - _MAX_SHOWN} more" if len(folders) > _MAX_SHOWN else ""
    return f", but it has folders: {', '.join(folders[:_MAX_SHOWN])}{more}"
