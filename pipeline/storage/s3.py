"""Access S3 and compatible stores: settings that travel to the workers, the requests, and errors without secrets.

This uses botocore rather than a file-system layer, because every request counts over millions of videos.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NamedTuple

from pipeline.errors import UsageError, make_printable
from pipeline.storage.downloads import Download, write_download
from pipeline.storage.outages import OUTAGES, Outage
from pipeline.storage.s3_access import (
    EXPIRED_CODES,
    explain_failure,
    explain_refusal,
    find_endpoint,
    has_no_credentials,
    start_session,
)

SCHEME = "s3://"
_RETRIES = 4  # further requests for a range whose download broke
_CONNECT_S = 10  # seconds that a store may take to accept a connection
_SILENT_S = 60  # seconds that a store may take to send the next bytes
# Seconds for which a request is retried. A store that has answered before will come back. One that never did may be a
# wrong address, and status 500 may be permanent: these get the shorter limit.
OUTAGE_S = 300.0
_DOUBTFUL_S = 20.0
_MAX_DELAY_S = 20.0  # the time between two tries grows up to this limit
_AWAY = frozenset({429, 502, 503, 504})
_AWAY_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "RequestLimitExceeded", "BandwidthLimitExceeded", "RequestThrottled"}
    | {"Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException"}
)
_ERRNO_BY_STATUS: Mapping[int, int] = {
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    416: errno.ERANGE,
}
_REMEDIES: Mapping[str, str] = {
    "NoRegionError": "set AWS_REGION",
    "InvalidRegionError": "AWS_REGION is not the name of a region",
    "ParamValidationError": "S3 does not allow the name of this bucket or key",
}
_ENVIRONMENT: Mapping[str, tuple[str, ...]] = {
    "endpoint_url": (),  # ``find_endpoint`` uses botocore, which also reads files
    "region_name": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "aws_access_key_id": ("AWS_ACCESS_KEY_ID",),
    "aws_secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
    "aws_session_token": ("AWS_SESSION_TOKEN",),
    "profile_name": ("AWS_PROFILE",),
}
_KEYS = frozenset({"aws_access_key_id", "aws_secret_access_key", "aws_session_token"})
_SECRET = ("endpoint_url", "aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_ADDRESS = re.compile(r"\bhttps?://[^\s\"'<>]+")
_ACCESS_KEY = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{8,}")
# Names of query parameters that select a version or may hold a secret, however their values end.
_QUERY = re.compile(
    r"(?:x-(?:amz|goog)-|versionid|response-|sig|awsaccesskeyid|token|key-pair-id)[\w.%-]*=", re.IGNORECASE
)
_UNSIGNED = (
    "note: no AWS credentials are configured. Sources on S3 are read unsigned, which only public buckets allow. For "
    "others set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
)


class ObjectInfo(NamedTuple):
    """An object in a listing.

    Attributes:
        mark: differs if the content does, such as an ETag; "" if unknown.
    """

    uri: str
    size: int
    mark: str = ""


class Upload(NamedTuple):
    """A pending multipart upload, neither completed nor aborted; the store keeps and bills its data.

    Attributes:
        uri: the object that it would become.
        started: the beginning, by the store's clock.
    """

    uri: str
    upload_id: str
    started: datetime


class Slice(NamedTuple):
    """A range of an object or file.

    Attributes:
        size: the size of the whole object in bytes.
    """

    data: bytes
    size: int


class Objects:
    """The client of S3 stores with the settings of this run.

    It can be pickled, threads may share it, and its repr hides secrets. It reads sources (videos, questions);
    ``make_store_client`` returns the client that also writes. The first request, or ``settle_access``, settles what the
    configuration leaves open: the endpoint, and whether sources are read unsigned. A pickled client keeps this
    decision.

    Requests that a busy or absent store does not answer are retried for up to five minutes. Methods that send requests
    raise OSErrors that name the URI: FileNotFoundError, PermissionError, or a general one.
    """

    def __init__(
        self,
        *,
        patience: float = 1.0,
        answered: bool = False,
        decided: bool = False,
        unsigned: bool | None = None,
        requester_pays: bool = False,
        **settings: str | None,
    ) -> None:
        """Create a client; no request is sent.

        Args:
            patience: scales the timeouts of a request; below 1, a request is sent at most twice.
            answered: True if the store has ever answered with these settings.
            decided: True if ``settings`` has the configured endpoint and region.
            unsigned: True to send unsigned requests from processes that find no credentials. None decides later. It
                becomes False if there are keys in ``settings``, or with ``requester_pays``.
            requester_pays: accept the cost of reads from buckets whose owners want that.
            settings: arguments of botocore's client (the keys of ``_ENVIRONMENT``), of which empty ones are dropped.
        """
        assert not (settings.keys() - _ENVIRONMENT.keys()), settings.keys()
        self._settings = {name: value for name, value in settings.items() if value}
        self._patience = patience
        self._answered = answered
        self._decided = decided
        self._unsigned = False if requester_pays or self._settings.keys() & _KEYS else unsigned
        self._requester_pays = requester_pays
        self._client_of_process: tuple[int, Any] | None = None  # (process id, client)

    @classmethod
    def from_environment(cls, endpoint: str | None = None, requester_pays: bool = False) -> Objects:
        """Create a client from the AWS_* variables of this process, which its pickled copies keep.

        Once temporary credentials among them expire, each process uses the credentials that botocore finds.
        ``endpoint`` overrides the configured one.
        """
        settings: dict[str, Any] = {
            name: next((os.environ[variable] for variable in variables if os.environ.get(variable)), None)
            for name, variables in _ENVIRONMENT.items()
        }
        return cls(requester_pays=requester_pays, **{**settings, "endpoint_url": endpoint})

    def with_short_timeouts(self) -> Objects:
        """Return a client that sends a request at most twice, with a fifth of the timeouts."""
        return self._copy(patience=0.2)

    def make_store_client(self) -> Objects:
        """Return the client for a cache or results: its requests are always signed and do not offer to pay."""
        if self._unsigned is False and not self._requester_pays:
            return self
        return self._copy(unsigned=False, requester_pays=False)

    def settle_access(self, uri: str) -> None:
        """Settle the endpoint and whether requests are signed, before the client is pickled.

        No request is sent to a store, but the machine's metadata service may be asked for a role. If there are no
        credentials, a note says that sources are read unsigned.

        Raises:
            OSError: the configuration cannot be used.
        """
        with self._errors(uri):
            if self._decided and self._unsigned is not None:
                return
            self._settle_access(start_session(self._settings.get("profile_name")))

    def _settle_access(self, session: Any) -> None:
        """Look up the endpoint, the region and whether there are credentials, and store the results in this client.

        What is already set stays. A note is printed if sources are read unsigned.
        """
        if not self._decided:
            configured = {"endpoint_url": find_endpoint(session), "region_name": session.get_config_variable("region")}
            self._settings = {name: value for name, value in configured.items() if value} | self._settings
        if self._unsigned is None:
            self._unsigned = has_no_credentials(session)
            if self._unsigned:
                OUTAGES.say(_UNSIGNED)
        self._decided = True

    def _start_session(self) -> Any:
        """Start a botocore session with the profile of the settings.

        If this node lacks the profile, the configuration is decided, and requests are unsigned or have keys in the
        settings, the profile is removed from the settings. Otherwise ProfileNotFound is raised.
        """
        from botocore.exceptions import ProfileNotFound  # noqa: PLC0415 - only where a store is used

        try:
            return start_session(self._settings.get("profile_name"))
        except ProfileNotFound:
            if not self._decided or not (self._unsigned or self._settings.keys() & _KEYS):
                raise
            del self._settings["profile_name"]
            return start_session(None)

    def _copy(self, **changes: Any) -> Objects:
        return Objects(**{**self._state(), **changes})

    def _state(self) -> dict[str, Any]:
        """Return the keyword arguments that create an equal client."""
        state = {"patience": self._patience, "answered": self._answered, "decided": self._decided}
        return state | {"unsigned": self._unsigned, "requester_pays": self._requester_pays, **self._settings}

    def __reduce__(self) -> tuple[Callable[[], Objects], tuple[()]]:
        return partial(Objects, **self._state()), ()

    def __repr__(self) -> str:
        return "Objects(...)"

    def list(self, prefix: str, *, deep: bool = False) -> Iterator[ObjectInfo]:
        """Yield the objects whose URIs begin with ``prefix``, in order of their keys, with one request per thousand.

        Keys that end in "/" (folders that consoles make) are left out, and without ``deep`` also keys that have another
        "/" after the prefix.
        """
        bucket, key = _split_uri(prefix)
        options = {} if deep else {"Delimiter": "/"}
        with self._errors(prefix):
            for page in (
                self._get_client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key, **options)
            ):
                for item in page.get("Contents", ()):
                    if not item["Key"].endswith("/"):
                        yield ObjectInfo(f"{SCHEME}{bucket}/{item['Key']}", int(item["Size"]), item.get("ETag", ""))

    def info(self, uri: str) -> ObjectInfo:
        """Return the object's URI, size and ETag, with one request."""
        answer = self._request("head_object", uri)
        return ObjectInfo(uri, int(answer["ContentLength"]), answer.get("ETag", ""))

    def compute_age(self, uri: str) -> timedelta:
        """Return the time since an object was written, by the store's clock, or by this machine's without a Date."""
        answer = self._request("head_object", uri)
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        now = datetime.now(UTC) if date is None else parsedate_to_datetime(date)
        written_at: datetime = answer["LastModified"]
        return now - written_at

    def exists(self, uri: str) -> bool:
        """Return True if there is such an object, with one request; errors other than its absence are raised."""
        try:
            self.info(uri)
        except FileNotFoundError:
            return False
        return True

    def read(self, uri: str) -> bytes:
        """Read a whole object, in one request unless the connection breaks."""
        parts: list[bytes] = []
        self.fetch(uri, parts.append)
        return b"".join(parts)

    def read_slice(self, uri: str, start: int, end: int | None = None) -> Slice:
        """Read bytes [start, end) in one request; a negative ``start`` counts from the end, and needs ``end=None``.

        If the connection breaks, the request is repeated up to four times. The last bytes of an empty object are empty.

        Raises:
            OSError: (ERANGE) ``start`` is behind the end of the object; (EIO) the store sends another range.
        """
        byte_range = f"bytes={start}" if start < 0 else f"bytes={start}-{'' if end is None else end - 1}"
        with self._errors(uri):
            for retries in range(_RETRIES + 1):
                try:
                    return _read_answer_slice(self._request("get_object", uri, Range=byte_range), start, end)
                except _get_broken_download_errors():
                    if retries == _RETRIES:
                        raise
                except OSError as error:
                    if error.errno == errno.ERANGE and start < 0:
                        return Slice(b"", 0)  # stores answer 416 to a range of an empty object
                    raise
        raise AssertionError("not reached")

    def download(self, uri: str, start: int = 0, end: int | None = None) -> Download:
        """Send the request for bytes [start, end) of an object, and return an iterator over its pieces; close it."""

        def ask(byte_range: str | None, mark: str | None) -> Any:
            more = {name: value for name, value in (("Range", byte_range), ("IfMatch", mark)) if value is not None}
            return self._request("get_object", uri, **more)

        return Download(ask, partial(self._errors, uri), _get_broken_download_errors(), start, end)

    def fetch(self, uri: str, write: Callable[[bytes], object], limit: int | None = None) -> int:
        """Download an object into ``write`` piece by piece, and return its size in bytes.

        Args:
            limit: the largest size allowed, in bytes; None for no limit.

        Raises:
            OSError: (EFBIG) the object is larger than ``limit``; nothing is read. (ETIMEDOUT) The download is too slow:
                below 256 KiB/s and two minutes late.
        """
        with self.download(uri) as download:
            return write_download(download, write, limit, uri)

    def put(self, uri: str, data: Any) -> None:
        """Write a whole object in one request (at most 5 GiB): afterwards it is complete, or as it was before."""
        self._request("put_object", uri, Body=bytes(data))

    def delete(self, uri: str) -> None:
        """Remove an object; do nothing if there is none."""
        self._request("delete_object", uri)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield the pending multipart uploads of objects whose URIs begin with ``prefix``."""
        bucket, key = _split_uri(prefix)
        with self._errors(prefix):
            for page in self._get_client().get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=key):
                for item in page.get("Uploads", ()):
                    if item["Key"].startswith(key):  # not every store applies the prefix
                        yield Upload(f"{SCHEME}{bucket}/{item['Key']}", item["UploadId"], item["Initiated"])

    def abort_upload(self, upload: Upload) -> None:
        """Abort a multipart upload; do nothing if there is none."""
        with suppress(FileNotFoundError):
            self._request("abort_multipart_upload", upload.uri, UploadId=upload.upload_id)

    def redact(self, text: str) -> str:
        """Replace secrets of these settings and credentials, access keys and web addresses in a text by ``***``."""
        secrets = [self._settings[name] for name in _SECRET if name in self._settings]
        secrets += [value.partition("://")[2] for value in secrets if "://" in value]
        signer = self._describe_signer()[0]
        # Credentials from a file or a role are read without their properties, which would refresh them.
        names = ("access_key", "secret_key", "token", "_access_key", "_secret_key", "_token")
        secrets += [value for name, value in vars(signer).items() if name in names] if signer is not None else []
        for value in sorted(filter(None, secrets), key=len, reverse=True):
            text = text.replace(value, "***")
        return _ACCESS_KEY.sub("***", _ADDRESS.sub("***", text))

    def _request(self, operation: str, uri: str, **more: object) -> Any:
        """Send one request about an object, with the arguments ``more``, and return botocore's answer."""
        bucket, key = _split_uri(uri)
        with self._errors(uri):
            return getattr(self._get_client(), operation)(Bucket=bucket, Key=key, **more)

    def _get_client(self) -> Any:
        """Return the botocore client of this process, which the first call creates; a fork creates its own."""
        if self._client_of_process is None or self._client_of_process[0] != os.getpid():
            session = self._start_session()
            is_driver = self._unsigned is None
            self._settle_access(session)
            # A node with other credentials, such as a role, signs its requests even if the driver has none.
            unsigned = bool(self._unsigned) and (is_driver or session.get_credentials() is None)
            client = _connect(session, self._settings, self._patience, unsigned=unsigned)
            client.meta.events.register("before-call.s3", _note_start)
            if self._requester_pays:
                client.meta.events.register("before-call.s3", _add_payer_header)
            client.meta.events.register_first("needs-retry.s3", self._compute_delay)
            client.meta.events.register_first("needs-retry.s3", partial(_renew_credentials, client, self._settings))
            self._client_of_process = os.getpid(), client
        return self._client_of_process[1]

    def _compute_delay(
        self,
        response: tuple[Any, Mapping[str, Any]] | None,
        attempts: int,
        caught_exception: Exception | None,
        request_dict: Mapping[str, Any],
        **_: object,
    ) -> float | None:
        """Return the seconds until botocore sends a request again; None if the answer stands or the patience is over.

        The delay grows to 20 seconds, with jitter. A request is tried at least twice, and again for 300 seconds, or for
        20 if the store has never answered or the failure may be permanent (status 500); an impatient client tries
        twice. The answer or failure is reported to ``OUTAGES``.
        """
        place: str = request_dict["context"][_PLACE]
        sent: float = request_dict["context"][_SENT]
        self._answered |= response is not None
        failure = _describe_failure(response, caught_exception)
        if failure is None:
            OUTAGES.note_answer(place)
            return None
        why, ends = failure
        OUTAGES.note_failure(Outage(place, sent, why))
        tried_s = time.time() - sent
        longest_s = OUTAGE_S if self._answered and ends else _DOUBTFUL_S
        if attempts >= 2 and (self._patience < 1 or tried_s >= longest_s):
            return None
        return random.uniform(0.5, 1) * min(_MAX_DELAY_S, 0.2 * 1.6**attempts)

    def _describe_signer(self) -> tuple[Any, str | None]:
        """Return (the credentials that sign this process's requests or None, the profile or None)."""
        client = self._client_of_process[1] if self._client_of_process is not None else None
        return client and client._request_signer._credentials, self._settings.get("profile_name")

    @contextmanager
    def _errors(self, uri: str) -> Iterator[None]:
        """Convert errors in the context to OSErrors that name the URI, with a remedy and without endpoint and secrets.

        Status 404 becomes FileNotFoundError, 401 and 403 become PermissionError, 416 has errno ERANGE, and other errors
        of the client have EIO. An OSError keeps its errno, but has EIO if it names another file.
        """
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - only where a store is used
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        try:
            yield
        except ClientError as error:
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            error_fields = error.response.get("Error", {})
            code = error_fields.get("Code") or str(status)
            text = self.redact(f"{code}: {error_fields.get('Message') or 'the store gives no reason'}")
            text += explain_refusal(status, code, *self._describe_signer())
            # OSError() returns its subclass (FileNotFoundError and so on) for the error number.
            raise OSError(_ERRNO_BY_STATUS.get(status, errno.EIO), text, uri) from None
        except (BotoCoreError, HTTPError, ValueError) as error:  # the original text names the endpoint
            name = type(error).__name__
            remedy = explain_failure(error, self._settings.get("profile_name")) or _REMEDIES.get(
                name, "check --s3-endpoint (AWS_ENDPOINT_URL) and the network"
            )
            raise OSError(errno.EIO, f"the object store cannot be used: {name}; {remedy}", uri) from None
        except OSError as error:
            if error.filename not in (None, uri):  # a missing file of credentials is not a missing object
                message = f"the credentials cannot be read from {error.filename}: {error.strerror}"
                raise OSError(errno.EIO, message, uri) from None
            raise OSError(error.errno or errno.EIO, self.redact(error.strerror or str(error)), uri) from None


def is_s3(uri: str) -> bool:
    """Return True if a URI begins with s3://."""
    return uri.startswith(SCHEME)


def has_query(uri: str) -> bool:
    """Return True if a URI ends in a query such as ``?versionId=1``.

    A query has a parameter of S3 or of a signature, or begins with NAME= and does not end in a file suffix:
    ``who?.mp4`` and ``watch?v=1.mp4`` give False.
    """
    query = uri.partition("?")[2]
    if any(map(_QUERY.match, query.split("&"))):
        return True
    return re.match(r"[\w.%-]+=", query) is not None and re.search(r"\.[A-Za-z]\w{1,4}$", query) is None


def check_uri(uri: str) -> None:
    """Raise UsageError if the URI has no valid bucket or has a user, host or query, or if boto3 is not installed."""
    bucket, _ = _split_uri(uri)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.\-_]{1,254}", bucket) or has_query(uri):
        shown_uri = re.sub(r"(?<=^s3://).*@|\?.*", "", uri)  # a user or a query may hold a secret
        raise UsageError(f"{shown_uri}: expected s3://BUCKET/KEY without user, host or query")
    try:
        import boto3  # noqa: F401, PLC0415
    except ImportError:
        raise UsageError(f"{uri}: S3 needs boto3: pip install -e '.[s3]' in the clone") from None


def _split_uri(uri: str) -> tuple[str, str]:
    """Split a URI into (bucket, key); the key is "" if there is none."""
    bucket, _, key = uri.removeprefix(SCHEME).partition("/")
    return bucket, key


def _read_answer_slice(answer: Any, start: int, end: int | None) -> Slice:
    """Read the body of an answer to a range request; if the store sent the whole object, return its bytes [start, end).

    Raises:
        OSError: (EIO) the store sent a range with another start.
    """
    data = answer["Body"].read()
    content_range = answer.get("ContentRange")
    if content_range is None:
        return Slice(data[start:end], len(data))
    first, size = int(content_range.split()[1].split("-")[0]), int(content_range.rpartition("/")[2])
    if first != (start if start >= 0 else max(0, size + start)):
        raise OSError(errno.EIO, f"the store sent another range than requested: {content_range}")
    return Slice(data, size)


def _connect(session: Any, settings: Mapping[str, str], patience: float, *, unsigned: bool) -> Any:
    """Create a botocore client for S3, without retries: ``Objects._compute_delay`` decides about these.

    With an endpoint it uses path-style addresses and only the checksums that a request needs. Without one, it also
    ignores endpoints that are configured on this node. ``patience`` scales the timeouts of 10 s to connect and 60 s of
    silence.
    """
    from botocore import UNSIGNED  # noqa: PLC0415 - only where a store is used
    from botocore.config import Config  # noqa: PLC0415

    # Other stores than AWS: all accept path-style addresses, but not all accept the checksums that boto3 adds.
    options: dict[str, Any] = {
        "s3": {"addressing_style": "path"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    config = Config(
        retries={"mode": "standard", "total_max_attempts": 1},  # ``Objects._compute_delay`` decides
        connect_timeout=_CONNECT_S * patience,
        read_timeout=_SILENT_S * patience,
        max_pool_connections=64,  # more than any thread pool here: urllib3 logs the endpoint when a pool is full
        signature_version=UNSIGNED if unsigned else None,
        # The driver found no endpoint: a node must not use one from its own configuration.
        ignore_configured_endpoint_urls=True if "endpoint_url" not in settings else None,
        **(options if "endpoint_url" in settings else {}),
    )
    keywords = {name: value for name, value in settings.items() if name != "profile_name"}
    return session.create_client("s3", config=config, **keywords)


def _describe_failure(
    response: tuple[Any, Mapping[str, Any]] | None, error: Exception | None
) -> tuple[str, bool] | None:
    """Return why a request failed if another try may succeed; None if its answer stands.

    Another try may succeed after an error of the connection, status 429, 500, 502, 503 or 504, and a code in
    _AWAY_CODES.

    Returns:
        (the reason without endpoint and secrets, False for status 500 without such a code, which may be permanent).
    """
    from botocore.exceptions import ConnectionError, HTTPClientError  # noqa: A004, PLC0415 - only where a store is used

    if response is None:
        return (type(error).__name__, True) if isinstance(error, ConnectionError | HTTPClientError) else None
    status = response[0].status_code
    code = make_printable(response[1].get("Error", {}).get("Code") or "")
    if status in _AWAY or code in _AWAY_CODES:
        return f"{status} {code}" if code not in ("", str(status)) else str(status), True
    return (f"{status} {code}", False) if status == 500 else None


_PLACE, _SENT = "gstep_place", "gstep_sent"  # keys of a request's context


def _note_start(params: Mapping[str, Any], context: dict[str, Any], **_: object) -> None:
    """Record the store and the time of the first try in a request's context."""
    bucket = context["input_params"]["Bucket"]
    context |= {_PLACE: f"{SCHEME}{bucket}", _SENT: time.time()}


def _add_payer_header(params: dict[str, Any], **_: object) -> None:
    """Add the header by which the sender agrees to pay for a request."""
    params["headers"]["x-amz-request-payer"] = "requester"


def _renew_credentials(
    client: Any,
    settings: Mapping[str, str],
    response: tuple[Any, Mapping[str, Any]] | None,
    attempts: int,
    **_: object,
) -> float | None:
    """Replace expired temporary credentials in ``client``, and return 0.0 so that botocore repeats the request at once.

    A reply with status 400 and no code, as to HEAD, counts as expired too.

    Returns:
        None if the failure has another cause, the settings have no session token, no credentials are found, or the
        request was tried more than twice.
    """
    if response is None or attempts > 2 or "aws_session_token" not in settings:
        return None
    signer = client._request_signer
    code = response[1].get("Error", {}).get("Code")
    if code not in EXPIRED_CODES and (code, response[1]["ResponseMetadata"]["HTTPStatusCode"]) != ("400", 400):
        return None
    credentials = start_session(settings.get("profile_name")).get_credentials()
    if credentials is None:
        return None
    signer._credentials = credentials  # another thread may have set them since this request was signed
    return 0.0


def _get_broken_download_errors() -> tuple[type[Exception], ...]:
    """Return the exception classes of a download whose connection breaks."""
    from botocore.exceptions import (  # noqa: PLC0415
        IncompleteReadError,
        ReadTimeoutError,
        ResponseStreamingError,
    )
    from urllib3.exceptions import HTTPError  # noqa: PLC0415 - botocore lets those of TLS through

    return IncompleteReadError, ReadTimeoutError, ResponseStreamingError, HTTPError
