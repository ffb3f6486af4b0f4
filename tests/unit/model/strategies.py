"""Names as people, frameworks and file systems make them."""

from __future__ import annotations

from hypothesis import strategies as st

AWKWARD_PATHS = (
    "a b/c+d&e",
    "tab\tand\nnewline",
    "..a/.../b..",
    "%2E%2E/%41",
    "~home/~",
    "sha256-" + "0" * 64 + ".pt",
    "-leading/--dash",
    "\u00e9/e\u0301",  # one letter, two spellings
    "\u202e\u2028\x85\x7f\x01",
    "epoch=1-step=100.ckpt/\U0001f600",
    "x" * 255,
    "\u00e4" * 127,
    "/".join(["d" * 200] * 10),
)

_letters = st.characters(exclude_characters="/\0", exclude_categories=["Cs"])
components = st.one_of(
    st.text("ab.~%/ ".replace("/", ""), min_size=1, max_size=6),
    st.text(_letters, min_size=1, max_size=20),
    st.text(_letters, min_size=1, max_size=2).map(lambda c: (c * 200)[:60]),
).filter(lambda c: c not in {".", ".."} and len(c.encode()) <= 255)
legal_paths = st.one_of(
    st.lists(components, min_size=1, max_size=5).map("/".join), st.sampled_from(AWKWARD_PATHS)
)
