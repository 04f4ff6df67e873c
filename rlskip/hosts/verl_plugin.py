"""What verl loads in each of its processes: attach, or say loudly why not.

verl 0.9 finds it by the entry point ``verl.plugins``, older releases by
``VERL_USE_EXTERNAL_MODULES=rlskip.hosts.verl_plugin``. verl keeps to itself what goes wrong in
an entry point.
"""

import os
import sys

try:
    from rlskip.hosts.verl import attach

    attach()
except Exception as error:
    print(f"rlskip could not attach to verl: {type(error).__name__}: {error}", file=sys.stderr)
    if "RLSKIP_JOB" in os.environ:
        # This job counts on it, and verl would go on without.
        raise SystemExit("rlskip could not attach to verl") from error
    raise
