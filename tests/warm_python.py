"""A Python that has imported torch and forks for each program that conftest.py asks it to run.

Importing torch, tensordict and Hydra takes seconds of CPU time, and more than a hundred tests start
programs that do. A program runs in a fork that has imported nothing of rlskip and in which Hydra
has looked for no plug-in. It begins with its own arguments, environment, directory, streams and
``__main__``. Code (`-c`) ends as any Python does, and a script as soon as its ``atexit`` is over.
"""

import atexit
import builtins
import contextlib
import gc
import json
import os
import socket
import struct
import sys
import types

status = None  # of a script that has ended, and not by Ctrl-C


@atexit.register  # before what is imported below, so that it is called last
def leave():
    """Leave all modules as they are: to tear torch down costs more than most scripts do."""
    if status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


import blosc2  # noqa: E402, F401
import hydra._internal.hydra  # noqa: E402, F401
import numpy as np  # noqa: E402
import tensordict  # noqa: E402, F401
import torch  # noqa: E402, F401


def next_program():
    """Wait for requests; return the program to run in the fork that is to run it."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    gc.freeze()  # or each program goes through all that was imported, once more as it ends
    while True:
        message, files, *_ = socket.recv_fds(requests, 1 << 20, 4)
        if not message:
            sys.exit()
        if os.fork():
            for file in files:
                os.close(file)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            continue
        requests.close()
        *streams, status = files
        if pid := os.fork():
            os.write(status, struct.pack("i", pid))
            for file in streams:
                os.close(file)
            os.write(status, struct.pack("i", os.waitpid(pid, 0)[1]))
            os._exit(0)
        os.close(status)
        for number, file in enumerate(streams):
            os.dup2(file, number)
            os.close(file)
        return json.loads(message)


def path_of(env):
    return [os.path.abspath(p) for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]


def begin(arguments, cwd, env):
    """Make this process like a new one; its source, and the name of that."""
    os.chdir(cwd)
    theirs = path_of(env)
    os.environ.clear()
    os.environ.update(env)
    sys.orig_argv = [sys.executable, *arguments]
    if arguments[0] == "-c":
        _, source, *more = arguments
        name, sys.argv, first = "<string>", ["-c", *more], ""
    else:
        sys.argv, name = arguments, os.path.abspath(arguments[0])
        first = os.path.dirname(name)
        with open(name, encoding="utf-8") as file:
            source = file.read()
    sys.path[:] = [first, *theirs, *(place for place in sys.path[1:] if place not in theirs)]
    np.random.seed()
    return source, name


os.fsync = lambda fd: None  # as in conftest.py
program = next_program()
source, name = begin(**program)
main = types.ModuleType("__main__")
main.__builtins__ = builtins
if name != "<string>":
    main.__file__ = name
sys.modules["__main__"] = main
sys.excepthook = lambda kind, error, trace: sys.__excepthook__(
    kind, error.with_traceback(trace.tb_next), None
)
try:
    exec(compile(source, name, "exec"), main.__dict__)
    status = 0
except SystemExit as end:
    status = end.code if isinstance(end.code, int) else int(end.code is not None)
    raise
except Exception:
    status = 1
    raise
finally:
    if name == "<string>":
        status = None
