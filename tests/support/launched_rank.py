"""The training loop of one rank under torchrun, which saves, has faults and keeps a log.

Run by `launch_jobs.Job`: `launched_rank.py CONFIG`. Ranks log each call of the library as JSON
lines with the machine's monotonic clock. Faults of this rank come from the configuration (at a
save's number) or from files that another process puts into `commands/RANK`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch_history import contents
from launch_jobs import STACKS_SIGNAL, Settings, kind_of
from limits import HANG_S
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import ckpt_storage
from ckpt_storage import AsyncSaver, CheckpointManager, SaveHandle, SaveState, Timeouts

_BUFFER_SIZE = 4096
_FINAL_COUNT = 4


class RaisingPlanner(DefaultSavePlanner):
    """A planner that raises before anything is sent."""

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise ZeroDivisionError("this planner raises")


class SlowPlanner(DefaultSavePlanner):
    """A planner that takes its time, on the rank that plans for all."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        time.sleep(self._seconds)
        return super().create_global_plan(all_plans)


class FailingPlanner(DefaultSavePlanner):
    """A planner that raises once all ranks have planned."""

    def create_global_plan(self, *_: object) -> tuple[list[SavePlan], Metadata]:
        raise ZeroDivisionError("this planner raises")


_PLANNERS: dict[str, Callable[[dict[str, Any]], DefaultSavePlanner]] = {
    "raise": lambda _: RaisingPlanner(),
    "fail": lambda _: FailingPlanner(),
    "slow": lambda fault: SlowPlanner(fault["seconds"]),
}


class RaisingState:
    """A `Stateful` whose `state_dict` raises."""

    def state_dict(self) -> dict[str, Any]:
        raise ZeroDivisionError("this state raises")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def hold_gil(seconds: float) -> None:
    """Keep the interpreter's lock in C, as an extension may."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def break_store_connections() -> int:
    """Shut down the connections of this process to the key-value store; return how many."""
    port, count = int(os.environ["MASTER_PORT"]), 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                is_internet = connection.family in {socket.AF_INET, socket.AF_INET6}
                if is_internet and connection.getpeername()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def forget_addresses() -> None:
    """Remove gloo's addresses of an earlier incarnation: torchrun keeps its store.

    The keys of this library stay.
    """
    rank, world_size, restart = (
        os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    )
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=HANG_S))
    store.delete_key(f"default_pg/0//cpu//0/{rank}")
    if store.add(f"launched/{restart}/count", 1) == int(world_size):
        store.set(f"launched/{restart}/all", "")
    store.wait([f"launched/{restart}/all"])


class Log:
    """Lines of JSON in a file of this process; safe in any thread and in signal handlers."""

    def __init__(self, path: Path, **common: Any) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self._common = common
        self._numbers = itertools.count(1)

    def write(self, event: str, **values: Any) -> None:
        line = {"event": event, "t": time.monotonic(), **self._common, **values}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    @contextlib.contextmanager
    def call(self, name: str, step: int = -1, **values: Any) -> Iterator[dict[str, Any]]:
        """Log a call, and how it ended; what the block puts into the dict is logged with it."""
        number, outcome = next(self._numbers), dict[str, Any]()
        self.write("call", name=name, id=number, step=step, **values)
        outcome["id"] = number
        try:
            yield outcome
        except BaseException as error:
            self.write("raised", name=name, step=step, **outcome, **described(error))
            raise
        self.write("returned", name=name, step=step, **outcome)


def described(error: BaseException) -> dict[str, Any]:
    info = getattr(error, "info", None)
    kind = kind_of(error)
    strange = {"trace": "".join(traceback.format_exception(error))} if kind == "strange" else {}
    return {
        "kind": kind,
        "error": type(error).__name__,
        "phase": getattr(error, "phase", None),
        "message": str(error)[:600],
        **({} if info is None else {"save_id": info.save_id, "slot": info.slot}),
        **strange,
    }


class Trainer:
    """One rank: its state, its saver and its faults."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.life = settings.run * 100 + restart
        log_path = settings.folder / "log" / f"{self.life:05d}-{self.rank}.jsonl"
        self.log = Log(log_path, rank=self.rank, life=self.life, pid=os.getpid())
        self.log.write("start")
        stacks = log_path.with_suffix(".stacks").open("w")
        faulthandler.register(STACKS_SIGNAL, file=stacks)
        self.timeouts = Timeouts(**settings.timeouts)
        self.mark = torch.zeros(3, dtype=torch.int64)
        self.buffer = torch.zeros(_BUFFER_SIZE)
        self.state: dict[str, Any] = {
            f"mark{self.rank}": self.mark,
            f"buffer{self.rank}": self.buffer,
            "step": 0,
        }
        self.step = self.save_count = 0
        self._worker: int | None = None
        self._handles: list[SaveHandle] = []
        self.manager: CheckpointManager | None = None
        self.saver: AsyncSaver | None = None
        if settings.api == "manager":
            self.manager = CheckpointManager(
                settings.url,
                every_steps=settings.every,
                signals=[signal.Signals[name] for name in settings.signals],
                timeout=self.timeouts,
                mode=settings.mode,
                on_error=settings.on_error,
            )
        elif settings.api == "saver":
            self.saver = AsyncSaver(
                mode=settings.mode,
                timeout=self.timeouts,
                on_error=settings.on_error,
                exit_timeout_s=10,
            )

    # Loading.

    def load(self) -> None:
        with self.log.call("load") as outcome:
            is_loaded = self._load()
            outcome["is_loaded"] = is_loaded
        if is_loaded:
            self.step = int(self.state["step"])
        seen: list[Any] = [None] * self.world_size
        dist.all_gather_object(seen, (self.step, self.mark.tolist()[:2]))
        is_mixed = len({str(pair) for pair in seen}) > 1 or self.mark[0] != self.step
        self.log.write("ready", step=self.step, mixed=bool(is_mixed), seen=str(seen))

    def _load(self) -> bool:
        if self.manager is not None:
            return self.manager.restore(self.state) is not None
        url: list[Any] = [self.settings.url]
        if not self.settings.rolling:
            if self.rank == 0:
                Path(self.settings.url).mkdir(parents=True, exist_ok=True)
                names = [info.name for info in ckpt_storage.list_checkpoints(self.settings.url)]
                url[0] = f"{self.settings.url}/{max(names)}" if names else None
            dist.broadcast_object_list(url, 0)
            if url[0] is None:
                return False
        try:
            ckpt_storage.load(self.state, url[0], timeout=self.timeouts)
        except (ckpt_storage.CheckpointNotFoundError, ckpt_storage.CheckpointInProgressError):
            return False
        return True

    # Training.

    def train(self) -> None:
        while not self._is_told_to_stop():
            self.step += 1
            time.sleep(self.settings.step_s)
            self.mark[0], self.mark[1] = self.step, self.life
            self.buffer.fill_(self.step)
            self.state["step"] = self.step
            if self._is_due():
                self._save_with_faults()
            if self.manager is not None and self.manager.preempted:
                self.log.write("preempted", step=self.step, why=self.manager.preempted)
                return
        if self.settings.has_finals:
            self._final_saves()

    def _is_told_to_stop(self) -> bool:
        ends = self.settings.steps is not None and self.step >= self.settings.steps
        if self.step % self.settings.lockstep_every:
            return ends
        flag = torch.tensor(int(ends or (self.settings.folder / "stop").exists()))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _is_due(self) -> bool:
        if self.manager is None:
            return self.step % self.settings.every == 0
        if not self.settings.signals and self.step % self.settings.every:
            return False
        try:
            with self.log.call("should_save", self.step) as outcome:
                outcome["answer"] = answer = self.manager.should_save(self.step)
                return answer
        except ckpt_storage.CheckpointError:
            return False

    def _save_with_faults(self) -> None:
        """Save, and suffer faults before, after, or (`after_s`) beside the call."""
        self.save_count += 1
        faults = self._faults()
        if any(fault["kind"] == "skip" for fault in faults):
            for fault in faults:
                # The others need a call.
                is_skip = fault["kind"] == "skip"
                self.log.write(
                    "fault" if is_skip else "dropped", fault=fault, begin=time.monotonic()
                )
            return
        planner: Any = None
        state = dict(self.state)
        for fault in faults:
            if fault.get("by") == "state":
                state["raising"] = RaisingState()
                self._note(fault)
            elif (planner_of := _PLANNERS.get(fault["kind"])) is not None:
                planner = planner_of(fault)
                self._note(fault)
            elif "after_s" in fault:
                threading.Timer(fault["after_s"], self._suffer, [fault]).start()
            elif not fault.get("after"):
                self._suffer(fault)
        with contextlib.suppress(ckpt_storage.CheckpointError):
            self.save(state, planner=planner)
        for fault in faults:
            if fault.get("after"):
                self._suffer(fault)

    def _faults(self) -> list[dict[str, Any]]:
        """Return what this rank is to suffer at this save, each once in the life of the job."""
        due = [
            fault
            for fault in self.settings.faults
            if fault["rank"] == self.rank and fault["at_save"] == self.save_count
        ]
        folder = self.settings.folder / "commands" / str(self.rank)
        for path in sorted(folder.glob("*.json"))[:2]:
            due.append(json.loads(path.read_text()))
            path.unlink()
        taken = self.settings.folder / "taken"
        fresh = []
        for fault in due:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(taken / str(fault["id"]), os.O_CREAT | os.O_EXCL))
                fresh.append(fault)
        return fresh

    def _suffer(self, fault: dict[str, Any]) -> None:
        begin_s, more = time.monotonic(), dict[str, Any]()
        kind, seconds = fault["kind"], fault.get("seconds", 0.0)
        if kind == "delay":
            time.sleep(seconds)
        elif kind == "gil":
            hold_gil(seconds)
        elif kind == "break":
            more["connections"] = break_store_connections()
        else:
            # It may end this process.
            self._note(fault)
            if kind == "signal":
                os.kill(os.getpid(), signal.Signals[fault["signal"]])
            elif kind == "signal-group":
                os.killpg(os.getpgrp(), signal.Signals[fault["signal"]])
            return
        self._note(fault, begin_s, **more)

    def _note(self, fault: dict[str, Any], begin_s: float | None = None, **more: Any) -> None:
        self.log.write("fault", fault=fault, begin=begin_s or time.monotonic(), **more)

    # Saving.

    @property
    def worker_pid(self) -> int | None:
        saver = self.saver
        if self.manager is not None and self.settings.background:
            saver = self.manager.saver
        return None if saver is None else saver.worker_pid

    def save(self, state: dict[str, Any], planner: Any = None) -> SaveHandle | None:
        """Save once; return a handle if it goes on in the background. Raises what was raised."""
        settings = self.settings
        self.mark[2] = self.save_count
        options: dict[str, Any] = {} if planner is None else {"planner": planner}
        url = settings.url if settings.rolling else f"{settings.url}/step-{self.step:08d}"
        options["overwrite"] = True
        if self.manager is not None:
            name = "begin" if settings.background else "save"
            save = self.manager.save_async if settings.background else self.manager.save
            arguments: tuple[Any, ...] = (self.step, state)
            url = self.manager.url_of(self.step)
        elif self.saver is not None:
            name, save, arguments = "begin", self.saver.save, (state, url)  # type: ignore[assignment]
        else:
            is_function = settings.api == "save_async"
            name = "begin" if is_function else "save"
            save = ckpt_storage.save_async if is_function else ckpt_storage.save  # type: ignore[assignment]
            arguments = (state, url)
            options["timeout"] = self.timeouts
        step = self.step
        with self.log.call(name, step, url=url) as outcome:
            result: Any = save(*arguments, **options)
            if isinstance(result, SaveHandle):
                number = outcome["id"]
                self._handles.append(result)
                result.add_done_callback(lambda handle: self._on_end(handle, number, step))
            else:
                outcome.update(save_id=result.save_id, slot=result.slot)
        self._log_worker()
        if isinstance(result, SaveHandle):
            return result
        self._inspect(url)
        return None

    def _log_worker(self) -> None:
        if self._worker != (pid := self.worker_pid):
            self._worker = pid
            self.log.write("worker", worker=pid)

    def _on_end(self, handle: SaveHandle, number: int, step: int) -> None:
        values: dict[str, Any] = {"kind": handle.state.value}
        if handle.state is SaveState.COMMITTED or self.settings.on_error == "warn":
            error = handle.exception(0)
            if error is not None:
                values = described(error)
            else:
                info = handle.result(0)
                values |= {"save_id": info.save_id, "slot": info.slot}
        self.log.write("ended", id=number, step=step, **values)
        if handle.state is SaveState.COMMITTED:
            self._inspect(handle.url)

    def _inspect(self, url: str) -> None:
        """Let rank 0 log what a reader sees now."""
        if self.rank == 0:
            try:
                self.log.write("seen", url=url, **contents(url))
            except ckpt_storage.CheckpointError as error:
                self.log.write("unreadable", url=url, **described(error))

    def _final_saves(self) -> None:
        """Wait for what is in flight; then save until one save succeeds on all ranks."""
        self._settle()
        for attempt in range(1, _FINAL_COUNT + 1):
            self.step += 1
            self.save_count += 1
            self.mark[0], self.mark[1] = self.step, self.life
            self.buffer.fill_(self.step)
            self.state["step"] = self.step
            dist.barrier()
            is_good = 0
            with contextlib.suppress(ckpt_storage.CheckpointError):
                handle = self.save(dict(self.state))
                if handle is not None:
                    handle.result()
                is_good = 1
            flag = torch.tensor(is_good)
            dist.all_reduce(flag, dist.ReduceOp.MIN)
            if flag:
                self.log.write("final", attempt=attempt, step=self.step)
                return
        self.log.write("final-failed", step=self.step)

    def _settle(self) -> None:
        for handle in self._handles:
            with contextlib.suppress(ckpt_storage.CheckpointError):
                handle.result()
        self._handles.clear()

    def close(self) -> None:
        closing: Callable[[], None] | None = None
        if self.manager is not None:
            closing = self.manager.close
        elif self.saver is not None:
            closing = self.saver.close
        if closing is None:
            self._settle()
            return
        try:
            with self.log.call("close", self.step):
                closing()
        except ckpt_storage.CheckpointError:
            if self.settings.has_strict_close:
                raise


def main() -> None:
    settings = Settings.read(Path(sys.argv[1]))
    for name in settings.handled:
        signal.signal(signal.Signals[name], lambda *_: None)
    torch.set_num_threads(1)
    forget_addresses()
    dist.init_process_group("gloo", timeout=timedelta(seconds=HANG_S))
    trainer = Trainer(settings)
    trainer.load()
    try:
        trainer.train()
    except BaseException as error:
        trainer.log.write("broken", error=type(error).__name__, message=str(error)[:600])
        raise
    trainer.close()
    trainer.log.write("end", step=trainer.step)
    # No rank ends while other members of its group still communicate.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
