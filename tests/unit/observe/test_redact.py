from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.observe.redact import redact

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
KEY_ID = "AKIAIOSFODNN7EXAMPLE"
_token = st.text(string.ascii_letters + string.digits + "/+=", min_size=8, max_size=60)


@pytest.mark.parametrize(
    "text",
    [
        f"s3://{KEY_ID}:{SECRET}@bucket/run",
        f"connecting to http://user:{SECRET}@localhost:9000/bucket failed",
        f"http://user:with@{SECRET}@host/x",
        f"https://b.s3.amazonaws.com/k?X-Amz-Credential={SECRET}&X-Amz-Expires=60",
        f"https://b.s3.amazonaws.com/k?X-Amz-Signature={SECRET}",
        f"https://b.s3.amazonaws.com/k?x-amz-security-token={SECRET}",
        f"x-amz-security-token: {SECRET}",
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f"aws_secret_access_key = {SECRET}",
        f"aws_session_token={SECRET}",
        f'{{"SecretAccessKey": "{SECRET}"}}',
        f"{{'SessionToken': '{SECRET}'}}",
        f"https://b/k?AWSAccessKeyId=x&Signature={SECRET}",
        f"Credential={KEY_ID}/20260101/us-east-1, Signature={SECRET}",
    ],
)
def test_p10_secrets_do_not_come_through(text: str) -> None:
    clean = redact(text, {})
    assert SECRET not in clean
    assert KEY_ID not in clean
    assert "***" in clean
    assert redact(clean, {}) == clean


@given(token=_token, before=st.text(max_size=20), after=st.text(max_size=20))
def test_p10_secrets_of_the_environment_do_not_come_through(
    token: str, before: str, after: str
) -> None:
    for variable in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID"):
        assert token not in redact(f"{before}{token}{after}", {variable: token})


def test_p10_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "opensesame")
    assert redact("it said opensesame!") == "it said ***!"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "multipart upload of saves/000000000100-abcd/n00000/f/model.pt is gone",
        "s3://bucket/run: AccessDenied; allow s3:PutObject",
        "http://localhost:9000/bucket/key timed out",
        "the signature does not match",
        "session token expired",
        "me@example.org",
    ],
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert redact(text, {"AWS_SECRET_ACCESS_KEY": "s3", "AWS_SESSION_TOKEN": ""}) == text
