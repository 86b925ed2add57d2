"""Freed memory that a process keeps."""

import subprocess
import sys

import pytest

# Page faults of two steps that allocate and free as those before them did.
STEPS = """
import resource, sys, torch
from mars_hf.training.cpu import keep_freed_memory

def step():
    held = [torch.ones(size << 20) for size in (1, 3, 5, 20)]

if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(5):
    step()  # the heap finds its shape
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step(), step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_a_step_finds_the_memory_of_the_step_before():
    def faults(how):
        done = subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    # Pages may be of 4 KiB or huge, so the one is compared with the other.
    assert faults("keep") * 10 < faults("leave")
