"""Servers, buckets and an environment without the developer's own credentials, for every test."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.servers import MotoServer, S3Server, WeedServer

if TYPE_CHECKING:
    from collections.abc import Iterator

# No deadline: a loaded machine is not a failing property. CI repeats the same examples every time,
# so that a change is blamed only for what it broke; `dev` keeps looking for new ones.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(scope="session", autouse=True)
def no_user_configuration() -> Iterator[None]:
    """Keep the developer's credentials, profile, endpoint and settings out of all tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("AWS_", "CKPT_TIERING_")):
                patch.delenv(name)
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


@pytest.fixture(scope="session")
def weed(no_user_configuration: None) -> Iterator[WeedServer]:
    """The honest S3 server; one for each test process, started when first asked for."""
    with WeedServer() as server:
        yield server


@pytest.fixture(scope="session")
def moto(no_user_configuration: None) -> Iterator[MotoServer]:
    """The S3 server that accepts wrong checksums; one for each test process."""
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="session", params=["weed", "moto"])
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    """Each S3 server in turn."""
    server = request.getfixturevalue(request.param)
    assert isinstance(server, S3Server)
    return server


@pytest.fixture
def bucket_url(weed: WeedServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh run's root on weed; the environment leads there, also for children."""
    return _fresh_root(weed, monkeypatch)


@pytest.fixture
def any_bucket_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Like ``bucket_url``, on each server in turn."""
    return _fresh_root(s3_server, monkeypatch)


def _fresh_root(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    return server.new_root()
