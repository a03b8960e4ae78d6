"""The program that a raylet runs to start a worker, in place of Ray's: it requests a worker from the fork server.

Every worker costs this extra process, so the program imports next to nothing.
"""

from __future__ import annotations

import _socket
import os
import sys

_SOCKET = "GSTEP_FORK_SERVER"  # repeats server.py, whose import would take time
_ANSWER_S = 45.0  # a server answers once its imports are done; after 60 s a raylet would kill this process


def request_worker(socket_path: str, program: list[str]) -> bool:
    """Request a fork that runs ``program`` with this process's environment, folder and output.

    Args:
        socket_path: the Unix socket of the server.
        program: a Python file and its arguments.

    Returns:
        True if the server has forked it; False if there is no server, or it has ended, refuses, or does not answer
        within _ANSWER_S seconds.
    """
    output = b"".join(descriptor.to_bytes(4, sys.byteorder) for descriptor in (1, 2))
    try:
        with open("/proc/self/oom_score_adj", encoding="ascii") as file:  # noqa: PTH123 - no pathlib here
            oom_score = file.read()
        variables = [f"{name}={value}" for name, value in os.environ.items()]
        fields = [sys.executable, os.getcwd(), oom_score, str(len(program)), *program, *variables]  # noqa: PTH109
        server = _socket.socket(_socket.AF_UNIX)
        server.settimeout(_ANSWER_S)
        try:
            server.connect(socket_path)
            server.sendmsg([b"."], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, output)])
            server.sendall(os.fsencode("\0".join(fields)))  # no field contains a NUL
            server.shutdown(_socket.SHUT_WR)
            return server.recv(1) == b"1"  # nothing if the server has ended or cannot fork
        finally:
            server.close()
    except OSError:
        return False


def main(arguments: list[str]) -> None:
    """Start a Ray worker: by a fork of the fork server, otherwise by Ray's own setup program.

    Return once the server has forked a worker. Otherwise, and for a worker with a runtime environment of its own, Ray's
    program replaces this process.

    Args:
        arguments: the arguments of Ray's setup program: Python's flags, then Ray's worker program and its options.
    """
    worker = next(at for at, argument in enumerate(arguments) if argument.endswith(".py"))  # after Python's flags
    context = "{}"
    program = list[str]()
    for argument in arguments[worker:]:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            context = value
        elif name != "--language":
            program.append(argument)
    if _is_plain(context) and request_worker(os.environ.get(_SOCKET, ""), program):
        return
    setup_worker = os.path.join(os.path.dirname(arguments[worker]), "setup_worker.py")  # noqa: PTH118, PTH120
    os.execv(sys.executable, [sys.executable, setup_worker, *arguments])


def _is_plain(context: str) -> bool:
    """Return True if a worker's context (JSON) sets nothing but, at most, this Python executable."""
    if context in {"", "{}"}:
        return True
    import json  # noqa: PLC0415 - see above

    settings = json.loads(context)
    python = settings.pop("py_executable", sys.executable)
    return python == sys.executable and not any(settings.values())


if __name__ == "__main__":
    main(sys.argv[1:])
