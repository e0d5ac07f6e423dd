"""Run ``vkv`` and tell what its threads do: all stacks on SIGUSR1, and counts all the time.

A script. ``$STACKS`` names the file for stacks, ``$ACTIVITY`` that for counts.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from vkv_cli.__main__ import main

#: Seconds between two samples, and samples between two files.
PAUSE, OFTEN = 0.2, 20


def place_of(frame: FrameType | None) -> str:
    """Return the innermost function of vkv or mlx-lm in a stack."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("vkv.", "mlx_lm.")):
            return f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "elsewhere"


def current_frames() -> dict[int, FrameType]:
    """Return the frame of each thread, while the garbage collector rests.

    Python below 3.12 holds the lock of its list of threads meanwhile. A collection there runs
    finalizers, which give up the GIL; whoever then begins a thread takes the GIL and waits for
    that lock, and all threads stand still for ever.
    """
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        gc.enable()


def count(place: Path) -> None:
    """Sample all threads for ever; threads that answer requests are counted together."""
    counts: Counter[str] = Counter()
    for number in range(1, sys.maxsize):
        time.sleep(PAUSE)
        names = {thread.ident: thread.name.partition("-")[0] for thread in threading.enumerate()}
        frames = current_frames()
        counts.update(f"{names.get(me, '?')}: {place_of(frame)}" for me, frame in frames.items())
        del frames
        if number % OFTEN == 0:
            new = place.with_suffix(".new")
            new.write_text(json.dumps(dict(counts.most_common(25))))
            new.replace(place)


if __name__ == "__main__":
    stacks = open(os.environ["STACKS"], "w")  # noqa: SIM115  # as long as the process
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    threading.Thread(target=count, args=(Path(os.environ["ACTIVITY"]),), daemon=True).start()
    sys.exit(main())
