"""Tasks of the dispatcher that workers, which share its event loop, do not see.

Code of theirs may cancel every task that it finds there
(``for task in asyncio.all_tasks(): task.cancel()``), as clean-up code of frameworks does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class HiddenTasks(set["asyncio.Task[None]"]):
    """Those that run: the event loop itself refers to them weakly."""

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine, which handles its own errors, from the next turn of the loop on."""
        # Not by the event loop, whose tasks a worker may have given another type.
        task = asyncio.Task(coroutine, loop=asyncio.get_running_loop())
        # What asyncio offers to other implementations of tasks ("Extending" in its guide).
        asyncio.tasks._unregister_task(task)
        self.add(task)
        task.add_done_callback(self.discard)
        return task
