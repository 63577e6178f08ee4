"""A meeting of all ranks that any rank can request, and for which no rank waits beforehand."""

from __future__ import annotations

import logging

from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import LostStoreError

log = logging.getLogger("ckpt_storage")

_AHEAD_TURNS = 2
_FAILED = b"failed"


class EarlyRendezvous:
    """Agrees on the turn at which all ranks meet.

    A turn is a step at which a rank asks whether to save; every rank counts turns from the last
    meeting on. A rank that wants a meeting publishes a request. Each rank that reads the request
    commits to an upper bound on the turn at which all meet, publishes it, and trains on. All meet
    at the highest bound. A rank that reaches its own bound before all ranks have published theirs
    declares the attempt failed; the next attempt has bounds twice as far ahead.
    """

    def __init__(self, ranks: RankGroup, *, timeout_s: float) -> None:
        self._ranks = ranks
        self._keys = ranks.keys
        self._timeout_s = timeout_s
        self._meeting_id = ""
        self._attempt = 0
        self._bound: int | None = None
        self._agreed_turn: int | None = None
        self._keys_to_delete: list[str] = []

    @property
    def is_committed(self) -> bool:
        """Whether this rank has published a bound: from then on it must `poll` at each turn."""
        return self._bound is not None

    def poll(self, turn: int, *, wants_meeting: bool) -> int | None:
        """Return the turn at which all meet, never before `turn`; None while it is open."""
        while self._agreed_turn is None and (
            self._bound is not None or self._commit(turn, wants_meeting=wants_meeting)
        ):
            agreement = self._agreement(turn)
            if agreement is None:
                return None
            if agreement == _FAILED:
                self._attempt += 1
                self._bound = None
            else:
                self._agreed_turn = int(agreement)
        return self._agreed_turn

    def reset(self, meeting_id: str) -> None:
        """Count turns from 0: all ranks have met, in the meeting of this unique id."""
        self._meeting_id = meeting_id
        self._attempt = 0
        self._bound = self._agreed_turn = None
        # All ranks have met, so no rank reads the earlier keys any more.
        try:
            while self._keys_to_delete:
                self._keys.delete(self._keys_to_delete[-1], self._timeout_s)
                self._keys_to_delete.pop()
        except LostStoreError as error:
            log.debug("keys of the last meeting stay in the store: %s", error)

    def _commit(self, turn: int, *, wants_meeting: bool) -> bool:
        """Publish a bound if any rank wants a meeting; return whether this rank did."""
        request, own_bound = self._key("request"), self._key(f"bound/{self._ranks.rank}")
        bound = turn + (_AHEAD_TURNS << self._attempt)
        try:
            if not wants_meeting and self._keys.get(request, self._timeout_s) is None:
                return False
            self._keys_to_delete += [own_bound, request] if wants_meeting else [own_bound]
            # It binds from the attempt to publish it on: a lost reply does not mean a lost request.
            self._bound = bound
            self._keys.set(own_bound, str(bound).encode(), self._timeout_s)
            if wants_meeting:
                self._keys.set_first(request, b"1", self._timeout_s)
        except LostStoreError as error:
            if self._bound is not None:
                raise
            log.debug("whether a rank wants a meeting is not known: %s", error)
            return False
        return True

    def _agreement(self, turn: int) -> bytes | None:
        """Return the agreed turn, or that the attempt failed; None while neither is published."""
        key = self._key("agreement")
        agreement = self._keys.get(key, self._timeout_s)
        if agreement is not None or self._bound is None or turn < self._bound:
            return agreement
        bound_keys = [self._key(f"bound/{rank}") for rank in range(self._ranks.world_size)]
        proposal = _FAILED
        if self._keys.has_all(bound_keys, self._timeout_s):
            bounds = [self._keys.get(bound_key, self._timeout_s) for bound_key in bound_keys]
            proposal = str(max(int(bound) for bound in bounds if bound is not None)).encode()
        self._keys_to_delete.append(key)
        self._keys.set_first(key, proposal, self._timeout_s)
        return self._keys.get(key, self._timeout_s)

    def _key(self, name: str) -> str:
        return f"early/{self._meeting_id}/{self._attempt}/{name}"
