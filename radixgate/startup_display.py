"""How far the engines are: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from engine_workers.startup_phase import NUM_PHASES, startup_phase
from engine_workers.supervisor import EngineState, EngineSupervisor

_LOOK_EVERY_S = 0.25


async def show_startup(
    engines: Sequence[EngineSupervisor],
    console: Console,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Show every engine's phase until all are ready.

    Args:
        engines: Their supervisors must be running.
        console: Where to show it.
        clock: Monotonic seconds.
    """
    began_at = clock()
    shown = {engine.name: "" for engine in engines}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[phase]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = {
            engine.name: progress.add_task(engine.name, total=NUM_PHASES, phase="starting")
            for engine in engines
        }
        while True:
            for engine in engines:
                num_done, phase = _phase(engine)
                if phase == shown[engine.name]:
                    continue
                shown[engine.name] = phase
                progress.update(bars[engine.name], completed=num_done, phase=phase)
                if not console.is_terminal:
                    print(f"{engine.name}: {phase} ({clock() - began_at:.0f} s)", flush=True)
            if all(engine.status.state is EngineState.READY for engine in engines):
                return
            await asyncio.sleep(_LOOK_EVERY_S)


def _phase(engine: EngineSupervisor) -> tuple[int, str]:
    if engine.status.state is EngineState.READY:
        return NUM_PHASES, "ready"
    if engine.status.state is EngineState.DEAD:
        return 0, f"will be started again: {engine.status.problem}"
    if engine.status.state is EngineState.NEW:  # its log is still another run's
        return 0, "starting"
    return startup_phase(engine.log_file, engine.log_begin)
