"""What verl loads in each of its processes: wrap the seams, or print why that failed.

verl logs errors of the entry point ``verl.plugins`` at DEBUG level only.
"""

import os
import sys

try:
    # The modules that declare what runs in a seam's place.
    from rlskip.hosts.verl import later_stages, no_engine, stages, trainer, v1  # noqa: F401
    from rlskip.hosts.verl.seams import seams

    seams.attach()
except Exception as error:
    print(f"rlskip could not attach to verl: {type(error).__name__}: {error}", file=sys.stderr)
    if "RLSKIP_JOB" in os.environ:
        # The job asks for rlskip, and verl would go on without it.
        raise SystemExit("rlskip could not attach to verl") from error
    raise
