"""Shared by all tests: where the repository is, and how to run its command lines."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The command lines under test may not ask the network; tests of what happens without one make their own arrangements.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def launch():
    """Runs `accelerate launch ARGS`, from the root of the repository; returns the completed process."""

    def run(*args, timeout=600, check=True, **kwargs):
        command = [str(Path(sys.executable).with_name("accelerate")), "launch", *map(str, args)]
        env = {**os.environ, **OFFLINE}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, **kwargs)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)} exited {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    return run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A text file of 150,000 characters, the start of the embedded corpus."""
    text = (ROOT / "mars_hf" / "data" / "embedded" / "austen.txt").read_text()
    path = tmp_path_factory.mktemp("corpus") / "small.txt"
    path.write_text(text[:150_000])
    return path


@pytest.fixture
def compiler():
    """Skips where fused=True of `MARS` finds no C++ compiler."""
    if not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no C++ compiler")


@pytest.fixture
def compiles(compiler, monkeypatch):
    """With fused=True even the smallest tensors go through the compiled functions."""
    monkeypatch.setattr("mars_hf.optim.compiled.SMALL", 2)


@pytest.fixture(params=[False, True], ids=["eager", "fused"])
def fused(request):
    """The argument of `MARS`: a test that takes it runs once by the eager passes, once by the compiled ones."""
    if request.param:
        request.getfixturevalue("compiles")
    return request.param
