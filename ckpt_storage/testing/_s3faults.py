"""What goes wrong on purpose, and the log of what was asked."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ckpt_storage.errors import InvalidInputError

__all__ = [
    "Action",
    "CrashWhen",
    "Effect",
    "FaultRule",
    "Journal",
    "RequestRecord",
    "ServerStats",
    "Ticket",
]

Action = Literal[
    "delay",
    "expired_token",
    "hang",
    "ignore_range",
    "lost",
    "reset",
    "reset_body",
    "status",
    "truncate",
]
CrashWhen = Literal["before", "after", "torn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """Which requests go wrong, and how.

    A rule matches a request if the regular expression `op` matches its whole op name and `key` is
    found anywhere in its object key. The first `after` matches are let pass, the next `times` are
    hit (0: all). Of several rules the first that hits wins, and later ones do not count that
    request; so a list of rules reads as a sequence.

    * `status`: read the body, do nothing, answer `status` with S3 error `code`. Status 200 gives
      the error document that S3 sends in a success.
    * `expired_token`: the same with 403 ExpiredToken.
    * `delay`: wait `delay_s` seconds, then serve as usual.
    * `hang`: never answer; the connection stays open until the server stops.
    * `reset`: reset the connection, with the work not done.
    * `lost`: do the work, then reset the connection in place of the answer.
    * `reset_body`: read `limit_bytes` bytes of the body, then reset; nothing is stored.
    * `truncate`: do the work, announce the whole answer, send `limit_bytes` bytes of it, reset.
    * `ignore_range`: answer a ranged read with 200 and the whole object.

    Raises `InvalidInputError` for a value that can match or mean nothing.
    """

    op: str = ".*"
    key: str = ""
    after: int = 0
    times: int = 1
    action: Action
    status: int = 503
    code: str = "SlowDown"
    delay_s: float = 1.0
    limit_bytes: int = 0

    def __post_init__(self) -> None:
        try:
            re.compile(self.op)
            re.compile(self.key)
            sound = (
                self.action in get_args(Action)
                and min(self.after, self.times, self.limit_bytes, self.delay_s) >= 0
                and 200 <= self.status <= 599
            )
        except (re.error, TypeError) as error:
            raise InvalidInputError(
                f"{self!r} is no fault rule: {error}.", next_step="Correct that field."
            ) from error
        if not sound:
            raise InvalidInputError(
                f"{self!r} is no fault rule.",
                next_step=f"Name one of {', '.join(get_args(Action))}; give counts from 0 up.",
            )

    @classmethod
    def from_json(cls, document: object) -> list[FaultRule]:
        """Read rules from a decoded JSON list of objects with the field names of this class.

        Raises `InvalidInputError` for anything else.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(document, list) or not all(
            isinstance(item, dict) and "action" in item and names.issuperset(item)
            for item in document
        ):
            raise InvalidInputError(
                "The fault rules are no JSON list of rules.",
                next_step=f"Give each an action; fields are {', '.join(sorted(names))}.",
            )
        return [cls(**item) for item in document]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request as the server saw it.

    `bytes_in` and `bytes_out` count decoded body bytes. `status` is 0 while no answer was sent, and
    for ever if none is. `fault` is the action that hit it, "crash" at a crash point, else "".
    """

    seq: int
    op: str
    bucket: str
    key: str
    bytes_in: int = 0
    bytes_out: int = 0
    status: int = 0
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStats:
    """Totals since the counters were reset: requests and body bytes by op, faults by action."""

    count: Mapping[str, int]
    bytes_in: Mapping[str, int]
    bytes_out: Mapping[str, int]
    faults: Mapping[str, int]
    open_uploads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What is to happen to one request: a rule's action with its figures, or "none"."""

    action: Action | Literal["none", "torn"] = "none"
    rule: FaultRule | None = None


@dataclass(slots=True, kw_only=True)
class Ticket:
    """One request's place in the log and its fate."""

    effect: Effect
    _journal: Journal
    _log: list[RequestRecord]
    _index: int

    def record(self, **changes: int) -> None:
        """Note what is known by now: `bytes_in`, `bytes_out`, `status`."""
        self._journal.amend(self._log, self._index, changes)


class Journal:
    """Numbers requests, decides which of them go wrong, remembers all; safe to share."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Replaced by a reset, so that the end of an older request goes to the log it began in.
        self._log: list[RequestRecord] = []
        self._rules: list[FaultRule] = []
        self._matches: list[int] = []
        self._crash: tuple[int, CrashWhen] | None = None

    def set_rules(self, rules: Iterable[FaultRule]) -> None:
        """Replace all rules; their match counts start from zero."""
        with self._changed:
            self._rules = list(rules)
            self._matches = [0] * len(self._rules)

    def set_crash(self, crash: tuple[int, CrashWhen] | None) -> None:
        """Set the crash point (sequence number and moment), or with None end the crash.

        Raises `InvalidInputError` for an unknown moment.
        """
        if crash is not None and crash[1] not in get_args(CrashWhen):
            raise InvalidInputError(
                f"A crash cannot come {crash[1]!r} a request.",
                next_step=f"Say one of {', '.join(get_args(CrashWhen))}.",
            )
        with self._changed:
            self._crash = crash

    def reset(self) -> None:
        """Forget all records; the next request has number 1."""
        with self._changed:
            self._log = []

    def begin(self, op: str, bucket: str, key: str) -> Ticket:
        """Number a request whose head was read, and decide its fate."""
        with self._changed:
            log = self._log
            seq = len(log) + 1
            crashed = self._crash is not None and seq >= self._crash[0]
            effect = self._crash_effect(seq) if crashed else self._rule_effect(op, key)
            fault = "crash" if crashed else effect.action
            log.append(
                RequestRecord(
                    seq=seq, op=op, bucket=bucket, key=key, fault="" if fault == "none" else fault
                )
            )
            self._changed.notify_all()
            return Ticket(effect=effect, _journal=self, _log=log, _index=seq - 1)

    def _crash_effect(self, seq: int) -> Effect:
        if self._crash is not None and seq == self._crash[0]:
            if self._crash[1] == "after":
                return Effect(action="lost")
            if self._crash[1] == "torn":
                return Effect(action="torn")
        return Effect(action="reset")

    def _rule_effect(self, op: str, key: str) -> Effect:
        for index, rule in enumerate(self._rules):
            if not re.fullmatch(rule.op, op) or not re.search(rule.key, key):
                continue
            self._matches[index] += 1
            hits = self._matches[index] - rule.after
            if hits > 0 and (rule.times == 0 or hits <= rule.times):
                return Effect(action=rule.action, rule=rule)
        return Effect()

    def amend(self, log: list[RequestRecord], index: int, changes: Mapping[str, int]) -> None:
        """Change figures of one record."""
        with self._changed:
            known: dict[str, Any] = dict(changes)
            log[index] = dataclasses.replace(log[index], **known)
            self._changed.notify_all()

    def records(self) -> list[RequestRecord]:
        """Return all records in order of their numbers, those not answered yet included."""
        with self._changed:
            return list(self._log)

    def wait_for(
        self, satisfied: Callable[[list[RequestRecord]], bool], *, timeout_s: float
    ) -> bool:
        """Wait until `satisfied` holds for the records; False once the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: satisfied(self._log), timeout_s)

    def stats(self, open_uploads: int) -> ServerStats:
        """Add the records up."""
        count: Counter[str] = Counter()
        bytes_in: Counter[str] = Counter()
        bytes_out: Counter[str] = Counter()
        faults: Counter[str] = Counter()
        for record in self.records():
            count[record.op] += 1
            bytes_in[record.op] += record.bytes_in
            bytes_out[record.op] += record.bytes_out
            if record.fault:
                faults[record.fault] += 1
        return ServerStats(
            count=dict(count),
            bytes_in=dict(bytes_in),
            bytes_out=dict(bytes_out),
            faults=dict(faults),
            open_uploads=open_uploads,
        )
