"""Takes secrets out of text before it is kept or shown. P10: telemetry never carries a secret."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["redact"]

_SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_MIN_SECRET_CHARS = 6  # shorter values would blank out ordinary words
_PATTERNS = (
    (re.compile(r"(?<=://)[^/\s:@]+:\S+@"), "***@"),  # secrets may hold a slash, or an @
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{12,}\b"), "***"),
    (re.compile(r"(?i)\b(x-amz-[a-z-]*(?:signature|credential|token)[a-z-]*=)[^&\s]+"), r"\1***"),
    (re.compile(r"(?i)\b(signature|awsaccesskeyid)=[^&\s]+"), r"\1=***"),
    (
        re.compile(
            r"(?i)(secret[_-]?access[_-]?key|(?:session|security)[_-]?token)([^\w*]{1,4})[^\s,;'\"]+"
        ),
        r"\1\2***",
    ),
)


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the text with credentials, URL userinfo and signatures replaced by ``***``.

    Args:
        text: Any text, such as an error message.
        environ: Environment whose secrets to look for; the process's own by default.
    """
    environ = os.environ if environ is None else environ
    for variable in _SECRET_VARIABLES:
        secret = environ.get(variable, "")
        if len(secret) >= _MIN_SECRET_CHARS:
            text = text.replace(secret, "***")
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text
