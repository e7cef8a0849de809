"""tsm.preemption: a script hears that its job is to end, saves, and ends so that its scheduler starts it again."""

from __future__ import annotations

import atexit
import weakref
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from tesserae import _C
from tesserae.job import config
from tesserae.job.fabrics import fabric_of

_listening: weakref.WeakSet[Preemption] = weakref.WeakSet()


class Preemption:
    """Made by tsm.preemption()."""

    def __init__(self, settings: config.Preemption) -> None:
        self.exit_code = settings.exit_code
        self._reason: str | None = None
        self._watch: _C.Watch | None = _C.Watch(
            file=settings.file, command=settings.command, every_seconds=settings.every_seconds
        )
        atexit.register(self.close)
        _listening.add(self)

    def requested(self) -> bool:
        """Whether any rank of the job was asked to end: the same answer on all of them.

        Collective over torch's default group, from the thread that trains, at the same place of each step: one
        all-reduce of eight bytes a rank over the host, which waits for no accelerator; none once it is true. Without
        torch.distributed it is this process's own answer.
        """
        if self._reason is None and self._watch is not None:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                self._reason = self._watch.agree(fabric_of(None, torch.device("cpu")))
            else:
                self._reason = self._watch.notice()
        return self._reason is not None

    @property
    def requested_here(self) -> bool:
        """Whether this process was asked; the others may not know. Not collective, and nearly free."""
        return self._reason is not None or (self._watch is not None and self._watch.notice() is not None)

    @property
    def reason(self) -> str | None:
        """What asked first, and on which rank, once requested() was true: "SIGUSR1 (rank 2)"."""
        return self._reason

    def exit(self) -> NoReturn:
        """Ends the script with `exit_code`. Save before, and let saves that run beside training end."""
        raise SystemExit(self.exit_code)

    def close(self) -> None:
        """Stops listening: handlers of signals are what they were before. Again it does nothing."""
        self._watch = None
        atexit.unregister(self.close)

    def __enter__(self) -> Preemption:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def preemption(
    *,
    file: str | None = None,
    command: str | None = None,
    every_seconds: float | None = None,
    exit_code: int | None = None,
) -> Preemption:
    """Listens, from now on, for a request to end this job before its work is done. Once in a script, on every rank.

    Requests are SIGTERM and SIGUSR1 to any rank (handlers that were there are called too), a `file` that appears, and a
    `command` of the shell that ends with status 0; the first rank of each host asks the latter two every
    `every_seconds`, beside training. What is not given is as tsm.init was given it in the section `preemption`, or as
    docs/configuration.md says.

    Raises InvalidArgument for values that cannot work, and while another one listens.
    """
    given = {"file": file, "command": command, "every_seconds": every_seconds, "exit_code": exit_code}
    return Preemption(config.preemption({key: value for key, value in given.items() if value is not None}))


def end_epoch() -> None:
    """What listens was made by a script's train(), which runs again (tsm.elastic)."""
    for each in list(_listening):
        each.close()


def is_ending() -> bool:
    """Whether what listens has said that the job is to end: ranks then end together."""
    return any(each.reason is not None for each in _listening)
