"""Options of an obstore client from ``storage_options`` as fsspec users write them.

The options contain secrets, so they are passed to the client only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from ...errors import InvalidOptionError, redacted

Kind: TypeAlias = Literal["s3", "gcs", "azure"]

CLOUDS: Mapping[str, Kind] = {
    "s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure",
}  # fmt: skip

_TTL = timedelta(minutes=5)
# Options for caches, buffers and instances of fsspec, which obstore does not have.
_OF_FSSPEC = frozenset({
    "asynchronous", "loop", "skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths",
    "default_block_size", "default_cache_type", "default_fill_cache", "cache_regions", "max_concurrency",
    "fixed_upload_size", "block_size", "cache_type", "blocksize", "project", "access", "consistency", "cache_timeout",
    "batch_size", "requests_timeout", "timeout", "connection_timeout", "read_timeout", "location",
})  # fmt: skip

_OF_POLICY = ("read_timeout", "connect_timeout", "retries", "max_pool_connections", "user_agent", "signature_version")


class Unmapped(Exception):
    """An error for options without a counterpart in obstore. ``names`` has their names; values are never shown."""

    def __init__(self, *names: str) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names = tuple(sorted(names))


@dataclass(frozen=True, slots=True)
class Client:
    """The options of an obstore client. The secret ones are never shown."""

    kind: Kind
    bucket: str
    config: Mapping[str, Any] = field(repr=False)
    client_options: Mapping[str, Any] = field(repr=False)
    provider: Callable[[], Any] | None = field(default=None, repr=False)
    profile: str | None = None
    looks_up: bool = False
    """Whether ``complete`` asks botocore for credentials, which reads files and asks services."""

    def complete(self) -> Client:
        """Return these options with the credentials that botocore finds. Called in a thread, because it reads files and
        may ask a service. Raises ``InvalidOptionError``."""
        if not self.looks_up:
            return self
        config = dict(self.config)
        provider = _botocore_provider(self.profile, config)
        return replace(self, config=config, provider=provider, looks_up=False)

    def __reduce__(self) -> Any:
        raise TypeError("a client's options hold credentials: they are not pickled")


def client_for(protocol: str, bucket: str, options: Mapping[str, Any]) -> Client:
    """Return the obstore options for a bucket. Raises ``Unmapped`` for options that only the fsspec implementation
    has."""
    given = {key: value for key, value in options.items() if value is not None and key not in _OF_FSSPEC}
    kind = CLOUDS[protocol]
    if kind == "s3":
        return _s3(bucket, given)
    return _gcs(bucket, given) if kind == "gcs" else _azure(bucket, given)


def _s3(bucket: str, given: dict[str, Any]) -> Client:
    client = dict(given.pop("client_kwargs", None) or {})
    botocore = dict(given.pop("config_kwargs", None) or {})
    additional = dict(given.pop("s3_additional_kwargs", None) or {})
    addressing = dict(botocore.pop("s3", None) or {})
    for name in _OF_POLICY:
        botocore.pop(name, None)
    config: dict[str, Any] = {}
    wanted = {
        "access_key_id": given.pop("key", None) or given.pop("username", None) or client.pop("aws_access_key_id", None),
        "secret_access_key": (
            given.pop("secret", None) or given.pop("password", None) or client.pop("aws_secret_access_key", None)
        ),
        "session_token": given.pop("token", None) or client.pop("aws_session_token", None),
        "region": client.pop("region_name", None),
        "server_side_encryption": additional.pop("ServerSideEncryption", None),
        "sse_kms_key_id": additional.pop("SSEKMSKeyId", None),
    }
    config.update((name, value) for name, value in wanted.items() if value)
    if given.pop("anon", False):
        config["skip_signature"] = True
    if given.pop("requester_pays", False):
        config["request_payer"] = "requester"
    endpoint = given.pop("endpoint_url", None) or client.pop("endpoint_url", None) or _environment_endpoint()
    secure = client.pop("use_ssl", given.pop("use_ssl", True))
    verify = client.pop("verify", True)
    profile = given.pop("profile", None)
    style = addressing.pop("addressing_style", "path" if endpoint else "auto")
    left = [*given, *client, *botocore, *addressing, *additional]
    if left or isinstance(verify, str):
        raise Unmapped(*left, *(["verify"] if isinstance(verify, str) else []))
    if endpoint:
        config["endpoint"] = endpoint
    config["virtual_hosted_style_request"] = style != "path" and "." not in bucket
    # With TLS the payload is protected. Without it the signature has to cover the payload.
    config["checksum_algorithm"] = "crc64nvme"
    config["unsigned_payload"] = not endpoint or endpoint.startswith("https://") or _is_loopback(endpoint)
    looks_up = not config.get("skip_signature") and "access_key_id" not in config
    if looks_up and profile is not None and find_spec("botocore") is None:
        raise Unmapped("profile")
    client_options = _client_options(endpoint, secure, verify)
    return Client("s3", bucket, config, client_options, profile=profile, looks_up=looks_up)


def _environment_endpoint() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _botocore_provider(profile: str | None, config: dict[str, Any]) -> Callable[[], Any] | None:
    """Return a function that gets credentials from botocore, which knows profiles, SSO and roles; None if obstore finds
    credentials by itself or botocore has none. Adds the region to ``config``."""
    # obstore reads these variables itself. Profiles, SSO and roles are known to botocore only.
    if profile is None and os.environ.get("AWS_ACCESS_KEY_ID"):
        return None
    try:
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
    except ImportError:
        return None
    session = Session(profile=profile)
    try:
        if "region" not in config and (region := session.get_config_variable("region")):
            config["region"] = region
        credentials = session.get_credentials()
    except BotoCoreError as error:  # no such profile, or files that cannot be read
        raise InvalidOptionError(f"the AWS credentials cannot be used: {redacted(str(error))}") from error
    if credentials is None:
        return None

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            # botocore renews its credentials when they are asked for. With this date obstore asks again after five
            # minutes, and never uses credentials that botocore has replaced long ago.
            "expires_at": datetime.now(UTC) + _TTL,
        }

    return provide


def _gcs(bucket: str, given: dict[str, Any]) -> Client:
    token = given.pop("token", None)
    config: dict[str, Any] = {}
    if token == "anon" or given.pop("anon", False):
        config["skip_signature"] = True
    elif isinstance(token, Mapping) and token.get("type") == "service_account":
        config["service_account_key"] = json.dumps(dict(token))
    elif isinstance(token, str) and token not in ("google_default", "cloud"):
        if token in ("browser", "cache") or not os.path.isfile(token):
            raise Unmapped("token")
        config["application_credentials"] = token
    elif token is not None and not isinstance(token, str):
        raise Unmapped("token")
    if given:  # also an endpoint: emulators lack the API with which obstore uploads
        raise Unmapped(*given)
    return Client("gcs", bucket, config, {})


def _azure(bucket: str, given: dict[str, Any]) -> Client:
    container, _, host = bucket.partition("@")
    config: dict[str, Any] = {"account_name": host.partition(".")[0]} if host else {}
    parts = dict(
        piece.split("=", 1) for piece in (given.pop("connection_string", None) or "").split(";") if "=" in piece
    )
    wanted = {
        "account_name": given.pop("account_name", None) or parts.get("AccountName"),
        "account_key": given.pop("account_key", None) or parts.get("AccountKey"),
        "sas_key": given.pop("sas_token", None) or parts.get("SharedAccessSignature"),
        "client_id": given.pop("client_id", None),
        "client_secret": given.pop("client_secret", None),
        "tenant_id": given.pop("tenant_id", None),
        "endpoint": given.pop("account_host", None) or parts.get("BlobEndpoint"),
    }
    config.update((name, value) for name, value in wanted.items() if value)
    anonymous = given.pop("anon", None)
    if anonymous and not {"account_key", "sas_key", "client_secret"} & config.keys():
        config["skip_signature"] = True
    if given:
        raise Unmapped(*given)
    endpoint = config.get("endpoint")
    if endpoint and "://" not in endpoint:
        endpoint = config["endpoint"] = f"https://{endpoint}"
    return Client("azure", container, config, _client_options(endpoint, True, True))


def _client_options(endpoint: str | None, secure: bool, verify: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if (endpoint and endpoint.startswith("http://")) or not secure:
        options["allow_http"] = True
    if not verify:
        options["allow_invalid_certificates"] = True
    return options


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
