"""How far this host's clock is off, by the time that a store puts on its answers."""

from __future__ import annotations

from contextlib import closing
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from ckpt_tiering.stores.s3_client import connect

if TYPE_CHECKING:
    from ckpt_tiering.clock import Clock
    from ckpt_tiering.config import StoreOptions
    from ckpt_tiering.model.layout import StoreUrl

__all__ = ["clock_offset"]

_HALF_A_TICK_S = 0.5  # the header has whole seconds


def clock_offset(url: StoreUrl, options: StoreOptions, clock: Clock) -> float | None:
    """Return by how many seconds this host's clock is ahead of the store's, give or take one.

    Makes one request; that it is refused does not matter.

    Returns:
        The offset; None if there was no answer, or one without a time.
    """
    before = clock.now()
    try:
        with closing(connect(options, 1)) as client:
            answer: Any = client.head_bucket(Bucket=url.bucket)
    except ClientError as error:
        answer = error.response
    except BotoCoreError:
        return None
    after = clock.now()
    try:
        date = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    except (KeyError, TypeError, ValueError):
        return None
    return (before + after) / 2 - date.timestamp() - _HALF_A_TICK_S
