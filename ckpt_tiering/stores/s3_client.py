"""The boto3 client of `S3Store`: configured as boto3 users expect, with its helpers off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

from ckpt_tiering.errors import ConfigError

if TYPE_CHECKING:
    from ckpt_tiering.config import StoreOptions

__all__ = ["connect"]

CONNECT_TIMEOUT_S = 15
READ_TIMEOUT_S = 60  # between two pieces of an answer, not for the whole of it


def connect(options: StoreOptions, concurrency: int) -> Any:
    """Make a boto3 client in a session of its own; reads credentials and configuration anew.

    Args:
        options: Where the store is; what is None is found as boto3 users expect
            (``AWS_ENDPOINT_URL``, profiles, instance roles, ...).
        concurrency: Number of threads that will use the client at once.

    Raises:
        ConfigError: The endpoint is not a URL.
        botocore.exceptions.BotoCoreError: What boto3 raises; `S3Store` translates it.
    """
    session = boto3.Session(profile_name=options.profile, region_name=options.region)
    # Servers of one's own seldom have a DNS name for each bucket. For an endpoint that boto3 finds
    # by itself (environment, profile) its 'auto' means paths too.
    style = "path" if options.endpoint_url else "auto"
    config = Config(
        signature_version="s3v4",
        # Without this boto3 hashes every body by SHA-256, even when it has a checksum already.
        s3={"payload_signing_enabled": False, "addressing_style": style},  # type: ignore[arg-type]
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"mode": "standard", "total_max_attempts": 1},
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        max_pool_connections=concurrency + 4,
        tcp_keepalive=True,
    )
    try:
        return session.client("s3", endpoint_url=options.endpoint_url, config=config)
    except ValueError as error:
        raise ConfigError(
            "the endpoint of the store is not a valid URL", hint="write http(s)://host:port"
        ) from error
