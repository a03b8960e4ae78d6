"""An S3 server, caches that tests may damage, a browser for pages, an empty vLLM, and what decode processes import."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def pytest_collection_finish() -> None:
    """Let the server that forks decode processes import, once, what requests of the tests name."""
    if (sandbox := sys.modules.get("pipeline.video.sandbox")) is not None:
        sandbox._PRELOAD.append("tests.pipeline.forging")


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Any]:
    """A headless Chromium; skips where there is none."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium with its driver on the PATH (Debian: apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    quiet = ("background-networking", "component-update", "sync", "gpu", "dev-shm-usage")
    flags = ["headless", "no-sandbox", "no-first-run", "window-size=1280,900", *(f"disable-{name}" for name in quiet)]
    for flag in (*flags, f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    yield running
    running.quit()


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    """A video file."""
    from tests.builders.clips import write_clip  # noqa: PLC0415 - loads PyAV

    return write_clip(tmp_path_factory.mktemp("clips") / "a.mp4")


@pytest.fixture(scope="module")
def module_server() -> Iterator[Any]:
    from tests.builders.stores import S3Server  # noqa: PLC0415 - most files need no store, whose libraries load slowly

    with S3Server() as server:
        client = server.objects()
        server.objects = lambda: client  # which takes long to make
        yield server


@pytest.fixture
def server(module_server) -> Any:
    """An S3 server, with an empty bucket and one client."""
    return module_server.renew()


@pytest.fixture(scope="session")
def sound(tmp_path_factory) -> Path:
    """A sound cache of six videos, which no test changes."""
    from tests.pipeline.verifying import six_videos  # noqa: PLC0415 - loads torch

    return six_videos(tmp_path_factory.mktemp("sound") / "c").root


@pytest.fixture
def store(sound, tmp_path) -> Any:
    """A copy of the sound cache that a test may damage."""
    from pipeline.storage.stores import LocalStore  # noqa: PLC0415 - loads slowly

    return LocalStore(shutil.copytree(sound, tmp_path / "c"))


@pytest.fixture(scope="session")
def tokens(sound) -> dict[str, Any]:
    """The tokens of the sound cache's videos."""
    from tests.pipeline.verifying import tokens_of  # noqa: PLC0415 - loads torch

    return tokens_of(sound)


@pytest.fixture
def vllm_package(tmp_path) -> Callable[[str, str], AbstractContextManager[None]]:
    """A function that lets an empty vLLM be installed for a while, by the name of its package and its version."""
    if find_spec("vllm") is not None:
        pytest.skip("vLLM is installed here")

    @contextmanager
    def install(name: str, version: str) -> Iterator[None]:
        folder = tmp_path / f"{name}-{version}"
        metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info/METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "vllm.py").touch()
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(folder)
            yield

    return install
