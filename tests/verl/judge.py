"""A reward model $JUDGE for verl without a GPU, and a note of what is computed, in $NOTES.

VERLCPU_EXTRA_MODULES loads this in each process of verl. verl starts the model, its router and the
reward workers; where there is a reward function (reward.py), it does not ask the model.
"""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rlskip._wrap import around, when_imported, wrap


def note(line):
    with open(os.environ["NOTES"], "a") as file:
        file.write(f"{line}\n")


class Answers(BaseHTTPRequestHandler):
    """What vLLM's server answers to /classify."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note("judges")
        score = sum(map(ord, asked["input"])) % 101 / 101
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"probs": [score]}]}).encode())

    def log_message(self, *args):
        pass


def register(module):
    class Judge(module.RolloutReplica):
        async def init_colocated(self, resource_pool):
            server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self._server_handle, self._server_address = None, f"127.0.0.1:{server.server_port}"

        init_standalone = launch_servers = init_colocated

        async def wake_up(self):
            pass

        sleep = wake_up

    module.RolloutReplicaRegistry.register(os.environ.get("JUDGE", "judge"), lambda: Judge)


@around
def computing(compute, self, data):
    note("computes reference log-probs")
    return compute(self, data)


def without_pinned_memory(module):
    """A reference model is offloaded to pinned memory, which needs a GPU."""
    policy = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda **_: policy(pin_memory=False)


when_imported("verl.workers.rollout.replica", register)
when_imported("verl.workers.engine.fsdp.transformer_impl", without_pinned_memory)
wrap(
    "verl.workers.engine_workers:ActorRolloutRefWorker.compute_ref_log_prob", computing, key="judge"
)
