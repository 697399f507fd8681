"""Who descends from whom, read from /proc; zombies do not count, they hold nothing any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")

TRACKER_GRACE_S = 1.0
"""Seconds after which a resource tracker is killed like any other process."""


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One living process."""

    pid: int
    parent_pid: int
    session_id: int


def living_processes() -> Iterator[ProcessEntry]:
    """Every process but zombies; some may be gone by the time they are looked at."""
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_bytes()
        except OSError:  # it is gone, or somebody else's and hidden from us
            continue
        # The name is in parentheses and may be any bytes: spaces, parentheses, half a character.
        fields = stat[stat.rindex(b")") + 2 :].split()
        if fields[0] not in (b"Z", b"X"):
            yield ProcessEntry(int(folder.name), int(fields[1]), int(fields[3]))


def descendants_of(pid: int) -> set[int]:
    """Children, their children and so on; without `pid` itself."""
    children: dict[int, list[int]] = {}
    for process in living_processes():
        children.setdefault(process.parent_pid, []).append(process.pid)
    found: set[int] = set()
    to_visit = [pid]
    while to_visit:
        for child in children.get(to_visit.pop(), ()):
            if child not in found:
                found.add(child)
                to_visit.append(child)
    return found


def members_of_session(session_id: int) -> set[int]:
    """Processes of one session, its leader included."""
    return {process.pid for process in living_processes() if process.session_id == session_id}


def first_to_kill(pids: set[int]) -> set[int]:
    """All but resource trackers of `multiprocessing`, for as long as `TRACKER_GRACE_S`.

    A tracker ends by itself once those it tracks for are gone, and then removes the shared memory
    that they left behind. Killed together with them, it would leave it for ever.
    """
    return {pid for pid in pids if not _is_resource_tracker(pid)}


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
