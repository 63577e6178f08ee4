"""What goes wrong on purpose in the S3 server, and its log of what was asked."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from ckpt_storage.errors import InvalidInputError

__all__ = ["Action", "CrashWhen", "FaultRule", "Journal", "RequestRecord", "crash_rules"]

Action = Literal["delay", "hang", "ignore_range", "lost", "reset", "status", "torn", "truncate"]
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
    * `delay`: wait `delay_s` seconds, then serve as usual.
    * `hang`: never answer; the connection stays open until the server stops.
    * `reset`: reset the connection, with the work not done.
    * `lost`: do the work, then reset the connection in place of the answer.
    * `torn`: read half of the body, if there is one, then reset; nothing is stored.
    * `truncate`: do the work, announce the whole answer, send half of it, close.
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

    def __post_init__(self) -> None:
        actions = get_args(Action)
        try:
            re.compile(self.op + self.key)
            counts = (self.after, self.times, self.delay_s, 599 - self.status)
            is_sound = self.action in actions and min(*counts, self.status - 200) >= 0
        except (re.error, TypeError):
            is_sound = False
        if not is_sound:
            step = f"Name one of {', '.join(actions)}; give counts from 0 up."
            raise InvalidInputError(f"{self!r} is no fault rule.", next_step=step)


def crash_rules(number: int, when: CrashWhen) -> list[FaultRule]:
    """Play the end of a client at the request with this number, counted from 1 from now on.

    No later request is done. That one is reset too ("before"), done with its answer lost
    ("after"), or cut within its body ("torn").
    """
    moments: dict[CrashWhen, Action] = {"before": "reset", "after": "lost", "torn": "torn"}
    # Each of the two counts the requests before; the second takes all that the first leaves.
    return [
        FaultRule(after=number - 1, action=moments[when]),
        FaultRule(after=number - 1, times=0, action="reset"),
    ]


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request as the server saw it.

    `bytes_in` and `bytes_out` count decoded body bytes. `status` is 0 while no answer was sent, and
    for ever if none is. `fault` is the action that hit it, else "".
    """

    seq: int
    op: str
    bucket: str
    key: str
    bytes_in: int = 0
    bytes_out: int = 0
    status: int = 0
    fault: str = ""


@dataclass(kw_only=True, eq=False)
class Journal:
    """Which requests go wrong, and the log of all; safe to share."""

    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _log: list[RequestRecord] = field(default_factory=list, init=False)
    _rules: list[FaultRule] = field(default_factory=list, init=False)
    _matches: Counter[int] = field(default_factory=Counter, init=False)

    def faults(self, rules: Iterable[FaultRule]) -> None:
        """Replace all fault rules, whose matches count from now on; an empty list ends them."""
        with self._changed:
            self._rules = list(rules)
            self._matches.clear()

    def reset_counters(self) -> None:
        """Forget all requests; the next one has sequence number 1."""
        with self._changed:
            self._log = []

    @property
    def requests(self) -> list[RequestRecord]:
        """All requests since the counters were reset, in order of arrival."""
        with self._changed:
            return list(self._log)

    def wait_for(
        self, satisfied: Callable[[list[RequestRecord]], bool], *, timeout_s: float = 30.0
    ) -> None:
        """Wait until `satisfied(requests)` holds; it runs under a lock and must be quick.

        Raises `TimeoutError`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: satisfied(self._log), timeout_s):
                raise TimeoutError(f"did not see the requests waited for in {timeout_s} s")

    def begin(self, op: str, bucket: str, key: str) -> tuple[RequestRecord, FaultRule]:
        """Number a request; return its record and the rule that hits it, if its `fault` says so."""
        with self._changed:
            rule = self._hit(op, key)
            record = RequestRecord(seq=len(self._log) + 1, op=op, bucket=bucket, key=key)
            record.fault = rule.action if rule else ""
            self._log.append(record)
            self._changed.notify_all()
            return record, rule or FaultRule(action="delay")

    def _hit(self, op: str, key: str) -> FaultRule | None:
        for index, rule in enumerate(self._rules):
            if re.fullmatch(rule.op, op) and re.search(rule.key, key):
                self._matches[index] += 1
                hits = self._matches[index] - rule.after
                if hits > 0 and (rule.times == 0 or hits <= rule.times):
                    return rule
        return None

    def note(self, record: RequestRecord, name: str, value: int) -> None:
        """Set a figure of a record."""
        with self._changed:
            setattr(record, name, value)
            self._changed.notify_all()
