"""`python -m runner` and `python -c` in processes forked from one that has imported torch."""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
from functools import cache
from importlib import import_module
from multiprocessing import forkserver, util
from pathlib import Path
from tempfile import TemporaryFile

ROOT = Path(__file__).parents[1]
FORK_SERVER = """ensure_running connect_to_new_process set_forkserver_preload
get_inherited_fds""".split()  # functions of the module, which are those of its first server
WITH_WORKERS = {"job=benchmark", "job=replay"}
WARM = """torch._dynamo numpy.ma markupsafe runner.cli.launch runner.cli.typos
runner.core.build.build runner.core.config.diagnosis runner.core.jobs.train runner.core.models.mlp
runner.core.objectives.classification runner.core.optim.equivalence runner.core.record.tensorboard
runner.core.techniques.compile runner.core.train.loop runner.core.train.sanity
runner.measure.curves""".split()  # what most commands import, and every optimizer of torch's


def run(
    folder: Path, typed: tuple[str, ...], variables: dict[str, str], timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` of `python -m runner` with these variables returns.

    Or of `python -c`, which is the first word that was typed then, with the program as the second.
    """
    server = _server()
    server.settimeout(timeout_s)
    request = json.dumps([str(folder), typed, variables]).encode()
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        socket.send_fds(server, [len(request).to_bytes(4, "big")], [out.fileno(), err.fileno()])
        server.sendall(request)
        try:
            code = int(server.recv(16))
        except TimeoutError:
            _server.cache_clear()  # the late answer is not that of the next command
            raise
        printed = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess(["python", "-m", "runner", *typed], code, *printed)


@cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair()
    # read when torch is imported; and this checkout's runner, not an installed one
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    variables.pop("PYTHONSAFEPATH", None)  # of an earlier test; `_become` replaces this folder
    with theirs:
        process = subprocess.Popen([sys.executable, __file__], stdin=theirs, env=variables)
    atexit.register(process.wait)
    atexit.register(ours.close)  # first, as it ends the server
    return ours


def _serve(requests: socket.socket) -> None:
    """Fork a child for each request and wait for it; only a child returns."""
    for name in WARM:
        import_module(name)
    from tests import composed, warm_workers

    composed.install()
    composed.compose_groups([])
    warm_workers.install()
    gc.freeze()
    while True:
        length, files, *_ = socket.recv_fds(requests, 4, 2)
        if not length:
            os._exit(0)
        text = requests.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
        request = json.loads(text)
        if WITH_WORKERS & {*request[1]}:
            forkserver.ensure_running()  # for all children, which cannot look after it
        composed.compose_groups(request[1])
        child = os.fork()
        if not child:
            requests.close()
            if forkserver._forkserver._forkserver_pid is not None:
                _share_or_forget(bool(WITH_WORKERS & {*request[1]}))
            composed.look_for_plugins_again()
            _become(*files, *request)
            return
        for file in files:
            os.close(file)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        requests.sendall(str(code).encode())


def _share_or_forget(shares: bool) -> None:
    """Of the fork server that this process's parent has started, and so looks after."""
    from runner.core import fork_server

    server = forkserver._forkserver
    if shares:
        server.ensure_running = lambda: None  # type: ignore[method-assign]
        server._stop = lambda: None  # type: ignore[method-assign]  # which others use, too
        fork_server.start_process = lambda process, *_: process.start()
    else:
        forkserver._forkserver = server = forkserver.ForkServer()
    for name in FORK_SERVER:
        setattr(forkserver, name, getattr(server, name))


def _become(out: int, err: int, folder: str, typed: list[str], variables: dict[str, str]) -> None:
    for file, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    places = variables.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [folder, *filter(None, places)]  # as `python -m` does
    if "-m" in typed or any(text.startswith("distributed") for text in typed):
        _hold_fork_server()
    if typed[:1] == ["-c"]:
        sys.argv = ["-c", *typed[2:]]
        program = compile(typed[1], "<string>", "exec", dont_inherit=True)
        exec(program, vars(sys.modules["__main__"]))  # noqa: S102
        return
    sys.argv = ["runner", *typed]
    runpy.run_module("runner", run_name="__main__", alter_sys=True)


def _hold_fork_server() -> None:
    """Fork what becomes the first fork server of this process, which so need not import torch."""
    ours, theirs = socket.socketpair()
    if not os.fork():
        ours.close()
        _become_fork_server(theirs)
    theirs.close()
    spawn = util.spawnv_passfds

    def become(path: str, arguments: list[str], passed: list[int]) -> int:
        if "forkserver" not in arguments[-1]:  # for example the tracker of resources
            return int(spawn(path, arguments, passed))
        util.spawnv_passfds = spawn
        request = json.dumps([arguments[-1], sorted(passed), dict(os.environ)]).encode()
        socket.send_fds(ours, [len(request).to_bytes(4, "big")], sorted(passed))
        ours.sendall(request)
        return int.from_bytes(ours.recv(4), "big")

    util.spawnv_passfds = become


def _become_fork_server(requests: socket.socket) -> None:
    length, files, *_ = socket.recv_fds(requests, 4, 8)
    if not length:
        os._exit(0)
    text = requests.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    code, numbers, variables = json.loads(text)
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, 100) for file in files]
    requests.sendall(os.getpid().to_bytes(4, "big"))
    os.closerange(3, 100)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(variables)
    try:
        exec(code, {})  # noqa: S102  # as the process does that would be started
    finally:
        os._exit(1)


if __name__ == "__main__":
    _serve(socket.socket(fileno=os.dup(0)))
