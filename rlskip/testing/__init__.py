"""What tests of your own can use.

A conformance suite for your own queue: subclass it in a test module and override its fixture;
pytest runs the rest::

    from rlskip.testing import QueueTests

    class TestMyQueue(QueueTests):
        @pytest.fixture
        def queue(self):
            return MyQueue()

:func:`each_fault` breaks the file operations below a directory, one at a time.
:func:`assert_same_training` compares a training with a golden one, stage by stage.
"""

from typing import TYPE_CHECKING

from rlskip._lazy import load_on_use

if TYPE_CHECKING:
    from rlskip.testing.faults import FaultyFiles, each_fault
    from rlskip.testing.queues import QueueTests
    from rlskip.testing.training import assert_same_training

__all__ = [
    "FaultyFiles",
    "QueueTests",
    "assert_same_training",
    "each_fault",
]

# Only the suite for queues needs pytest.
__getattr__ = load_on_use(
    __name__,
    {
        "rlskip.testing.faults": ["FaultyFiles", "each_fault"],
        "rlskip.testing.queues": ["QueueTests"],
        "rlskip.testing.training": ["assert_same_training"],
    },
)
