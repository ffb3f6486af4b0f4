"""Names of things: save ids, incarnations, nodes."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from ckpt_tiering.errors import FormatError

__all__ = ["SaveId", "new_incarnation", "node_name", "rank_name"]

MAX_STEP = 10**12 - 1
MAX_REPEAT = 10**6 - 1
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: sorts like the number
_INCARNATION = re.compile(r"[0-9a-z]{4,32}")
# Only what `str` writes: two spellings of one id would be two commits of one save.
_SAVE_ID = re.compile(r"([0-9]{12})-([0-9a-z]{4,32})(?:\.([1-9][0-9]{0,5}))?")


@dataclass(frozen=True, slots=True, order=True)
class SaveId:
    """Name of one save, unique even when a step is saved again.

    Ordered by step, then incarnation, then repeat: the newest save is the greatest id.

    Attributes:
        step: Training step, 0 to 10**12 - 1.
        incarnation: Token of the start of the job that made the save.
        repeat: Counts saves of one step within an incarnation, 0 to 10**6 - 1.
    """

    step: int
    incarnation: str
    repeat: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.step <= MAX_STEP:
            raise FormatError(f"step {self.step} is not between 0 and {MAX_STEP}")
        if not _INCARNATION.fullmatch(self.incarnation):
            raise FormatError(
                f"incarnation {self.incarnation!r} is not 4 to 32 characters of [0-9a-z]"
            )
        if not 0 <= self.repeat <= MAX_REPEAT:
            raise FormatError(f"repeat {self.repeat} is not between 0 and {MAX_REPEAT}")

    def __str__(self) -> str:
        suffix = f".{self.repeat}" if self.repeat else ""
        return f"{self.step:012d}-{self.incarnation}{suffix}"

    @classmethod
    def parse(cls, text: str) -> SaveId:
        """Read the text form.

        Raises:
            FormatError: The text is not a save id.
        """
        match = _SAVE_ID.fullmatch(text)
        if match is None:
            raise FormatError(f"{text!r} is not a save id such as 000000000100-01jdabcdefgh")
        return cls(int(match[1]), match[2], int(match[3] or 0))


def new_incarnation(now_s: float) -> str:
    """Make the token of one start of a job: sorts by start time, and is unique by chance.

    The clock only breaks ties between saves of one step made by different starts of one run.

    Args:
        now_s: Seconds since the epoch.
    """
    number = int(now_s * 1000)
    digits = []
    for _ in range(9):
        number, rest = divmod(number, 32)
        digits.append(_ALPHABET[rest])
    return "".join(reversed(digits)) + "".join(secrets.choice(_ALPHABET) for _ in range(5))


def node_name(node_rank: int) -> str:
    """Return the name of a node within a save."""
    return f"n{node_rank:05d}"


def rank_name(rank: int) -> str:
    """Return the name of a rank's shard within a save."""
    return f"r{rank:06d}"
