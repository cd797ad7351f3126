"""Commands as forks of a server that has imported the libraries, which takes an interpreter 8 s of a core.

Such a process has its own environment, folder, process group, signals, outputs and exit code, and ends as an
interpreter does. It tests nothing that precedes the imports, and all forks hash strings alike: a test of the start, or
of equal results from two processes, starts at least one interpreter.
"""

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = os.environ | {"DS_ACCELERATOR": "cpu"}  # as `set_environment` without a GPU
ROOT = str(Path(__file__).resolve().parents[2])


class Fork(subprocess.Popen):
    """`soren-align` with the arguments `args`, as a fork of the server; otherwise a subprocess.Popen.

    Of Popen's settings: stdin, stdout, stderr, text, cwd, env and start_new_session.
    """

    def _execute_child(self, args, *settings):
        (_, _, _, _, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
         *_, start_new_session, _) = settings  # fmt: skip
        sys.audit("subprocess.Popen", sys.executable, args, cwd, env)  # for the guard of the tiers
        request = {"arguments": args, "cwd": os.fspath(cwd or os.getcwd()), "env": dict(env or os.environ),
                   "start_new_session": start_new_session}  # fmt: skip
        self.connection, there = socket.socketpair()
        descriptors = [p2cread, c2pwrite, errwrite]
        descriptors = [number if own == -1 else own for number, own in enumerate(descriptors)]
        with there:
            socket.send_fds(server()[0], [b"."], [*descriptors, there.fileno()])
            self.connection.sendall(json.dumps(request).encode() + b"\n")
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        self.pid = int(self.connection.recv(8))
        self._child_created = True

    def _try_wait(self, wait_flags):
        if wait_flags & os.WNOHANG and not select.select([self.connection], [], [], 0)[0]:
            return 0, 0
        status = int(self.connection.recv(8))
        self.connection.close()
        return self.pid, status

    def _internal_poll(self, **_):
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


def free_port():
    """A port of this machine on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@functools.cache
def server():
    """A connection to the server, and its process, which ends with this one."""
    here, there = socket.socketpair()
    code = f"import sys; sys.path.append({ROOT!r}); from tests.support.forks import serve; serve({there.fileno()})"
    with there:
        return here, subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT, pass_fds=[there.fileno()])


def serve(descriptor):
    """Fork a command for each request, and end as the command where it is one."""
    import soren_align.launch.preloaded  # noqa: F401  as `soren-align compare` does

    sys.path.remove(ROOT)
    connection = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the commands
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # that the parent of a command does not stay as a zombie
    while True:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
        if not descriptors:
            os._exit(0)
        if os.fork():
            for number in descriptors:
                os.close(number)
        else:
            connection.close()
            break
    *outputs, number = descriptors
    answer = socket.socket(fileno=number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(answer.makefile().readline())
    if pid := os.fork():
        for number in outputs:
            os.close(number)
        answer.sendall(b"%8d" % pid)
        answer.sendall(b"%8d" % os.waitpid(pid, 0)[1])
        os._exit(0)
    answer.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["start_new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for number, output in enumerate(outputs):
        os.dup2(output, number)
        os.close(output)
    sys.argv = ["soren-align", *request["arguments"]]

    from soren_align.cli.app import main

    sys.exit(main())
