"""Errors of a bucket, with messages for people: from S3's error codes and from the AWS library's exceptions.

For ``bucket``. The codes are those of Amazon S3, which other stores with its protocol use as well.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from botocore import exceptions as aws

from quire_common.model_source import BucketSource
from quire_engine.errors import FetchError
from quire_engine.fetch.remote_files import Answer, Unreachable, first_line

ATTEMPTS = 4
"""The attempts of one call of the library before it fails."""
_PASSING = frozenset({"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling", "503", "500"})
_CREDENTIALS = (
    "locally they come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a role; on a cluster from the "
    "secret that spec.model.credentials.secretName names, or the service account's role"
)
_UNKNOWN_KEY = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId"})
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
_SKEWED = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_ELSEWHERE = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301", "307"}
)
_UNSIGNED_IN = (aws.NoCredentialsError, aws.PartialCredentialsError, aws.CredentialRetrievalError, aws.ProfileNotFound)
_LOGIN = (aws.UnauthorizedSSOTokenError, aws.SSOTokenLoadError, aws.TokenRetrievalError)
_NETWORK = (aws.HTTPClientError, aws.EndpointConnectionError, aws.ConnectionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    source: BucketSource
    endpoint: str
    anonymous: bool
    """No credentials were sent."""
    is_foreign: bool = False
    """True if the author of an adapter chose the store, which may be any server: its texts are not repeated."""


@contextmanager
def explained(where: Callable[[], Where]) -> Iterator[None]:
    """Raise the AWS library's exceptions as FetchError. ``where`` is called only when there is one."""
    try:
        yield
    except aws.ClientError as error:
        told = error.response.get("Error", {})
        region = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
        raise _problem(where(), str(told.get("Code", "")), str(told.get("Message", "")), region=region) from error
    except _UNSIGNED_IN as error:
        raise FetchError(f"no credentials for {where().source}: {first_line(error)}", hint=_CREDENTIALS) from error
    except _LOGIN as error:
        raise FetchError(
            f"the login for {where().source} has expired: {first_line(error)}", hint="run aws sso login"
        ) from error
    except _NETWORK as error:
        raise unreachable(where(), error) from error
    except (aws.BotoCoreError, ValueError) as error:
        why = "the store's answer cannot be read" if where().is_foreign else first_line(error)
        raise FetchError(f"{where().source} cannot be requested: {why}") from error


def of_answer(answer: Answer, where: Where, *, key: str) -> FetchError | None:
    """Return the error for an answer to a signed URL, or None if a new URL may work."""
    code, message = _element(answer.body, "Code"), _element(answer.body, "Message")
    if code in _PASSING or (code == "AccessDenied" and "expired" in message.lower()):
        return None
    region = answer.headers.get("x-amz-bucket-region") or _element(answer.body, "Region") or None
    return _problem(where, code or str(answer.status), message, region=region, key=key)


def unreachable(where: Where, error: BaseException) -> Unreachable:
    return Unreachable(
        f"{where.endpoint} cannot be reached for {where.source}: {first_line(error)}",
        hint="check the network and the endpoint, then run again; what was downloaded is kept and continued",
    )


def _problem(where: Where, code: str, message: str, *, region: str | None, key: str = "") -> FetchError:
    source, endpoint = where.source, where.endpoint
    said = f" ({code}: {message})" if message else f" ({code})"
    if where.is_foreign:
        said, region = "", None
    if code in _PASSING:
        return Unreachable(f"{endpoint} does not serve {source} now{said}", hint="run again later")
    if code == "NoSuchBucket":
        return FetchError(
            f"{endpoint} has no bucket {source.bucket}",
            hint="check its name; of another store than Amazon's give ?endpoint=https://… or AWS_ENDPOINT_URL",
        )
    if code in ("NoSuchKey", "404", "NotFound"):
        return FetchError(f"{source} has no {key or 'such object'} any more", hint="run again")
    if code in ("AccessDenied", "403", "Forbidden", "AllAccessDisabled"):
        return _denied(where, said)
    if code in _UNKNOWN_KEY:
        return FetchError(f"{endpoint} does not know the credentials for {source}{said}", hint=_CREDENTIALS)
    if code in _EXPIRED:
        return FetchError(f"the credentials for {source} have expired{said}", hint="get new ones; run again")
    if code in _SKEWED:
        return FetchError(
            f"{endpoint} refuses the time of this machine{said}",
            hint="set its clock: signatures are valid for 15 minutes",
        )
    if code == "InvalidObjectState":
        return FetchError(f"{key or source} is in an archive{said}", hint="restore it first, or copy it")
    if code in _ELSEWHERE:
        right = f"; it is in {region}" if region else ""
        return FetchError(
            f"{source} is in another region than the requested one{right}{said}",
            hint=f"write s3://{source.bucket}/{source.prefix}?region={region or 'REGION'}, or set AWS_REGION",
        )
    return FetchError(f"{endpoint} refused {source}{said}")


def _denied(where: Where, said: str) -> FetchError:
    if where.is_foreign:
        return FetchError(
            f"{where.source} is not public, and its store gets no credentials: it is not AWS_ENDPOINT_URL",
            hint="set AWS_ENDPOINT_URL in the secret of spec.engine.adapters.credentials, or in the environment",
        )
    if where.anonymous:
        return FetchError(f"no credentials were found, and {where.source} is not public{said}", hint=_CREDENTIALS)
    return FetchError(
        f"the credentials may not read {where.source}{said}",
        hint="they need s3:ListBucket on the bucket and s3:GetObject on its objects (kms:Decrypt where a key encrypts)",
    )


def _element(body: bytes, name: str) -> str:
    """Return an element of S3's small XML answers, or an empty string."""
    found = re.search(rf"<{name}>([^<]*)</{name}>".encode(), body)
    return found.group(1).decode(errors="replace") if found else ""
