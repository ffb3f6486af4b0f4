from __future__ import annotations

import json

import pytest

from ckpt_tiering.cli.render import (
    plain,
    print_error,
    print_json,
    print_table,
    print_text,
    progress_bar,
    show_age,
    show_name,
    show_time,
)
from ckpt_tiering.errors import ConfigError

EVIL = "\x1b[2J\x1b]0;title\x07\u202e\u2066\r\x9b31m"


@pytest.mark.parametrize("name", ["plain.ckpt", "é 日本", "a=1 [x] ?*#%+&:~", "-", "'"])
def test_ordinary_names_are_shown_as_they_are(name: str) -> None:
    assert show_name(name) == name


def test_no_two_names_look_the_same() -> None:
    names = ["a\x1b", "a\\x1b", "a\\\\x1b", "a\n", "a\\n", "a\u200b", "a", "\ud800"]
    shown = [show_name(name) for name in names]
    assert len(set(shown)) == len(names)
    assert all(text.isprintable() for text in shown)


def test_a_save_without_a_name() -> None:
    assert show_name(None) == "-"


def test_nothing_that_is_printed_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    print_text(EVIL)
    print_table(("a", ">b"), [(EVIL, EVIL), ("x", "y")])
    print_json({EVIL: EVIL})
    print_error(ConfigError(EVIL, hint=EVIL))
    out, err = capsys.readouterr()
    for text in (out, err):
        assert all(c.isprintable() for c in text.replace("\n", "")), repr(text)


def test_markup_in_a_name_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name",), [("[bold]x[/bold] [/] :smile: [link=http://x]",)])
    assert "[bold]x[/bold] [/] :smile: [link=http://x]" in capsys.readouterr().out


def test_a_table_in_a_pipe_is_never_cut_or_folded(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 5000
    print_table(("a", "b"), [(long, "y"), ("", "")])
    lines = capsys.readouterr().out.splitlines()
    assert long in lines[1]
    assert all(line == line.rstrip() for line in lines)


def test_json_is_ascii_and_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"name": EVIL + "é"}
    print_json(value)
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out) == value


def test_an_error_has_its_hint_and_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t-value")
    print_error(ConfigError("it holds s3cr3t-value", hint="drop https://me:pw@host"))
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: it holds ***\nhint: drop https://***@host\n"


@pytest.mark.parametrize(
    ("at", "shown"),
    [(0.0, "1970-01-01 00:00:00Z"), (1e300, "out of range"), (-1e18, "out of range"), (None, "-")],
)
def test_times(at: float | None, shown: str) -> None:
    assert show_time(at) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-5, "in the future"), (90, "1 m 30 s"), (7200, "2 h"), (3 * 86400, "3 d")],
)
def test_ages(seconds: float, shown: str) -> None:
    assert show_age(seconds) == shown


def test_messages_keep_their_lines() -> None:
    assert plain("a\nb\tc") == "a\nb\\tc"


def test_no_progress_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("x") as meter:
        meter.expect(10)
        meter.advance(10)
    assert capsys.readouterr() == ("", "")
