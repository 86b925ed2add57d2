"""What an import brings along: the modules, not the time."""

import os
import subprocess
import sys

import pytest


def loaded_by(root, statement, after="pass"):
    """Names of the modules that a statement loads in an interpreter where another has run already."""
    code = f"import sys\n{after}\nbefore = set(sys.modules)\n{statement}\nprint(*set(sys.modules) - before)"
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = set(done.stdout.split())
    assert "mars_hf" in names
    return {name for name in names if name.split(".")[0] not in {"mars_hf", *sys.stdlib_module_names}}


@pytest.mark.parametrize("package", ["mars_hf", "mars_hf.models, mars_hf.data, mars_hf.evaluation, mars_hf.plots"])
def test_packages_load_nothing(package, root):
    names = loaded_by(root, f"import {package}")
    assert not names, f"import {package} loads {sorted(names)[:9]}"


def test_the_optimizer_loads_torch_alone(root):
    names = loaded_by(root, "from mars_hf import MARS, mars_param_groups", after="import torch")
    assert not names, f"from mars_hf import MARS loads {sorted(names)[:9]}"


def test_the_trainer_loads_what_that_of_transformers_loads(root):
    names = loaded_by(root, "from mars_hf import MARSTrainer", after="from transformers import Trainer")
    assert names == {"transformers.hf_argparser"}, f"from mars_hf import MARSTrainer loads {sorted(names)[:9]}"
