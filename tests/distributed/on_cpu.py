"""Runs a script under a launch file that is meant for GPUs, on CPUs over gloo: for tests only.

    accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 \
        tests/distributed/on_cpu.py recipes/pretrain_gpt2.py --use_cpu true
"""

import os
import runpy
import sys
from pathlib import Path

import fsdp_on_cpu

if __name__ == "__main__":
    fsdp_on_cpu.enable()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        # DeepSpeed would look for a GPU, and compile a module for minutes that training does not use.
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
