"""A meeting sooner than it was agreed on: at a turn that every rank knows of before it comes.

No rank can go to a meeting alone, and none may wait for the others between two, as they may need
it to get there. So nobody waits here. A rank that wants a meeting puts a call on the board; who
sees it promises a turn past which it does not go without the word; and the word is put once: the
last of all promised turns, by whoever finds all promises there, or "none", by one that comes to
the end of its promise before. A rank reads it at its promised turn at the latest, which is no
later than the word's. Ranks that keep pace, so that none is two turns ahead of another, meet three
turns after the call at the latest; others promise more with each attempt.
"""

from __future__ import annotations

import contextlib
import logging

from ckpt_storage.coordination.board import Board, BoardError

__all__ = ["EarlyCall"]

log = logging.getLogger("ckpt_storage")

_AHEAD_TURNS = 2
_NONE = b"none"


class EarlyCall:
    """Calls of one rank's, and of others, between two meetings that were agreed on.

    Turns are counted from the last meeting on, alike on all ranks. Each request to the board ends
    within `timeout_s` seconds.
    """

    def __init__(self, board: Board, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._meeting_id = ""
        self._attempt = 0
        self._promised: int | None = None
        self._agreed: int | None = None
        self._left: list[str] = []

    @property
    def has_promised(self) -> bool:
        """Whether `look` must be called at the next turn."""
        return self._promised is not None

    def look(self, turn: int, *, wants: bool) -> int | None:
        """Return the turn of an early meeting, never before `turn`; None if none is agreed on.

        Raises `BoardError` if the board cannot be read after this rank has promised; before, that
        is the next meeting's to tell.
        """
        while self._agreed is None and (self._promised is not None or self._joins(turn, wants)):
            word = self._word(turn)
            if word is None:
                return None
            if word != _NONE:
                self._agreed = int(word)
            else:
                self._attempt += 1
                self._promised = None
        return self._agreed

    def anew(self, meeting_id: str) -> None:
        """Begin to count turns from 0, as all ranks met; take back what is on the board.

        `meeting_id` is that of no other meeting, also not of processes before these: what they left
        must not be taken for a call, nor for what was agreed on.
        """
        for key in self._left:
            with contextlib.suppress(BoardError):
                self._board.delete(key, self._timeout_s)
        self._left = []
        self._meeting_id = meeting_id
        self._attempt = 0
        self._promised = self._agreed = None

    def _joins(self, turn: int, wants: bool) -> bool:  # noqa: FBT001  # as it came
        """Call, or look for a call; promise if there is one."""
        call, own = self._key("call"), self._key(str(self._rank))
        promised = turn + _AHEAD_TURNS * (self._attempt + 1)
        try:
            if not wants and self._board.get(call, self._timeout_s) is None:
                return False
            self._left += [own, call] if wants else [own]
            # An answer may be lost, so it binds from the attempt on.
            self._promised = promised
            self._board.set(own, str(promised).encode(), self._timeout_s)
            if wants:
                self._board.set_first(call, b"1", self._timeout_s)
        except BoardError as error:
            if self._promised is not None:
                raise
            log.debug("whether ranks meet sooner is not known: %s", error)
            return False
        return True

    def _word(self, turn: int) -> bytes | None:
        key = self._key("word")
        word = self._board.get(key, self._timeout_s)
        if word is not None or self._promised is None or turn < self._promised:
            return word
        promises = [self._key(str(rank)) for rank in range(self._world_size)]
        found = _NONE
        if self._board.has_all(promises, self._timeout_s):
            told = [self._board.get(one, self._timeout_s) for one in promises]
            found = str(max(int(one) for one in told if one is not None)).encode()
        self._left.append(key)
        self._board.set_first(key, found, self._timeout_s)
        return self._board.get(key, self._timeout_s)

    def _key(self, name: str) -> str:
        return f"early/{self._meeting_id}/{self._attempt}/{name}"
