"""Find the endpoint and credentials of S3, and explain refusals: the source of the credentials and the remedy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

#: Error codes for expired credentials; a reply to HEAD has no code.
EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
_SET_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
# Error codes for credentials that the store does not know or cannot check.
_WRONG_CODES = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity", "AuthorizationHeaderMalformed"}
    | {"InvalidClientTokenId", "UnrecognizedClientException", "CredentialsNotSupported", "MissingSecurityHeader"}
)
_ARCHIVED = "InvalidObjectState"  # a 403 that is not about credentials
# Variables, and prefixes of keys in a profile, that configure a source of credentials.
_VARIABLES = (
    *("AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CREDENTIAL_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
_PROFILE_KEYS = ("aws_", "sso_", "credential_", "login_", "role_", "source_profile", "web_identity_")
_METADATA_S = 1.0  # botocore's own limit
_ROLES = "/latest/meta-data/iam/security-credentials/"
_NO_ROLE = frozenset({400, 403, 404, 405})  # also the answers of other clouds' metadata services


def start_session(profile: str | None) -> Any:
    """Start a botocore session, which finds settings and credentials as boto3 does."""
    from botocore.session import Session  # noqa: PLC0415 - only where a store is used

    session = Session(profile=profile)
    session.register_component("data_loader", _make_loader(session.get_config_variable("data_path")))
    return session


@cache
def _make_loader(folders: str | None) -> Any:
    """Return botocore's loader of interface descriptions, which caches them; ``folders`` may have additional ones."""
    from botocore.loaders import create_loader  # noqa: PLC0415 - only where a store is used

    return create_loader(folders)


def find_endpoint(session: Any) -> str | None:
    """Return the S3 endpoint that the environment or the profile configures, in botocore's order.

    None stands for AWS: no endpoint is configured, or the configuration says that they are ignored.
    """
    from botocore.configprovider import ConfiguredEndpointProvider  # noqa: PLC0415 - only where a store is used

    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    endpoint: str | None = ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "s3").provide()
    return endpoint


def has_no_credentials(session: Any) -> bool:
    """Return True if no credentials are configured anywhere: environment, files, any profile, container or instance.

    Credentials that botocore silently ignores count as configured: incomplete variables, other profiles, and a metadata
    service that fails. The machine's metadata service may be asked.

    Raises:
        BotoCoreError: credentials are incomplete or cannot be fetched.
        OSError: a file of credentials cannot be opened, or is named by a variable and missing.
    """
    if session.get_credentials() is not None or any(map(os.environ.get, _VARIABLES)):
        return False
    for kind, variable in (("config_file", "AWS_CONFIG_FILE"), ("credentials_file", "AWS_SHARED_CREDENTIALS_FILE")):
        try:
            open(os.path.expanduser(session.get_config_variable(kind)), "rb").close()  # noqa: PTH111, PTH123
        except (FileNotFoundError, NotADirectoryError):
            if variable in os.environ:
                raise
    profiles = session.full_config.get("profiles", {}).values()
    return not (
        any(key.startswith(_PROFILE_KEYS) for profile in profiles for key in profile) or _can_have_role(session)
    )


def _can_have_role(session: Any) -> bool:
    """Return False if the metadata service of this machine is disabled or absent, or says that there is no role.

    It sends up to two requests to the service, with a timeout of one second. If the service fails, or one that is
    configured does not answer, the result is True.
    """
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    provider = session.get_component("credential_provider").get_provider("iam-role")
    address = urlsplit(provider._role_fetcher.get_base_url())
    service = HTTPConnection(address.hostname or "", address.port or 80, timeout=_METADATA_S)
    try:
        service.connect()
    except OSError:
        return session.get_config_variable("ec2_metadata_service_endpoint") is not None
    try:
        service.request("PUT", "/latest/api/token", headers={"x-aws-ec2-metadata-token-ttl-seconds": "60"})
        reply = service.getresponse()
        token = reply.read().decode("latin-1")
        service.request("GET", _ROLES, headers={"x-aws-ec2-metadata-token": token} if reply.status == 200 else {})
        return service.getresponse().status not in _NO_ROLE
    except (OSError, HTTPException, ValueError):
        return True
    finally:
        service.close()


def describe_credentials(credentials: Any, profile: str | None) -> str:
    """Describe where botocore credentials come from, such as "the instance role" or a variable or file by its name."""
    session = start_session(profile)
    name = session.profile or "default"
    files = {
        kind: f"profile {name} of {session.get_config_variable(kind)}" for kind in ("config_file", "credentials_file")
    }
    sources: Mapping[str, str] = {
        "explicit": "the environment (AWS_ACCESS_KEY_ID)",
        "env": "the environment (AWS_ACCESS_KEY_ID)",
        "shared-credentials-file": files["credentials_file"],
        "config-file": files["config_file"],
        "iam-role": "the instance role",
        "container-role": "the container's role",
    }
    if credentials.method == "assume-role-with-web-identity" and os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return "the web identity token (AWS_WEB_IDENTITY_TOKEN_FILE)"
    return sources.get(credentials.method, f"{credentials.method}, {files['config_file']}")


def explain_refusal(status: int, code: str, credentials: Any, profile: str | None) -> str:
    """Return "; " and why a refused request may have the wrong credentials, with the remedy; "" for other failures.

    Refusals are status 401 and 403 (except for archived objects), 400 without a code, and codes about expired or wrong
    credentials.

    Args:
        code: the error code in the reply; the status as text if the reply has none.
        credentials: the botocore credentials that signed the request; None if it was unsigned.
    """
    is_silent = code == str(status)  # the reply to HEAD has no text
    is_refusal = status in (401, 403) or (status == 400 and is_silent) or code in EXPIRED_CODES | _WRONG_CODES
    if not is_refusal or code == _ARCHIVED:
        return ""
    if credentials is None:
        return f"; no credentials are configured, and a request without them is refused here: {_SET_KEYS}"
    source = f"the credentials from {describe_credentials(credentials, profile)}"
    if code in EXPIRED_CODES:
        return f"; {source} have expired: rerun the command with new credentials"
    if code == "RequestTimeTooSkewed":
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        return f"; {source} are refused because the clock of this machine is wrong ({now}): set it"
    if code in _WRONG_CODES:
        return f"; {source} are wrong, or not those of this store or region: correct them"
    if is_silent:
        return f"; the store gives no reason. Perhaps {source} are wrong, have expired or do not allow this: check them"
    return f"; {source} do not allow this"


def explain_failure(error: Exception, profile: str | None) -> str | None:
    """Return the cause and remedy of a botocore exception about credentials or their files; None for others."""
    name = type(error).__name__
    details = getattr(error, "kwargs", {})
    if name == "NoCredentialsError":
        return f"no credentials in the environment, in {_name_files(profile)}, or of a role: {_SET_KEYS}"
    if name == "PartialCredentialsError":
        provider = details.get("provider")
        place = "the environment" if provider in ("explicit", "env") else _name_files(profile)
        return f"the credentials in {place} are partial: {details.get('cred_var', 'a key')} is missing; set it too"
    if name == "ProfileNotFound":
        variable = "AWS_DEFAULT_PROFILE" if not profile and os.environ.get("AWS_DEFAULT_PROFILE") else "AWS_PROFILE"
        return f"{variable} names a profile ({details.get('profile')}) that the files of credentials do not have"
    if name in ("ConfigParseError", "InvalidConfigError", "InfiniteLoopConfigError", "UnknownCredentialError"):
        return f"the files of credentials cannot be used: correct {_FILES}"
    if name in ("SSOTokenLoadError", "UnauthorizedSSOTokenError", "TokenRetrievalError") or name.startswith("Login"):
        return f"the credentials of {_name_files(profile)} have expired: run aws sso login"
    if name in ("CredentialRetrievalError", "MetadataRetrievalError", "SSOError", "InvalidIMDSEndpointError"):
        provider = details.get("provider", "the metadata service")
        return f"the credentials cannot be had from {provider}: check that it answers, or {_SET_KEYS}"
    if name == "JSONDecodeError":
        return f"the credentials cannot be had from credential_process, which prints no valid JSON: {_SET_KEYS}"
    return None


_FILES = "~/.aws/config and ~/.aws/credentials (AWS_CONFIG_FILE, AWS_SHARED_CREDENTIALS_FILE)"


def _name_files(profile: str | None) -> str:
    """Return "profile NAME of CONFIG and CREDENTIALS" with the paths of the two files."""
    session = start_session(profile)
    kinds = ("config_file", "credentials_file")
    return f"profile {session.profile or 'default'} of {' and '.join(map(session.get_config_variable, kinds))}"
