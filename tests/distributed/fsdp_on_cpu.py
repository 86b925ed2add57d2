"""FSDP2 on CPUs, which accelerate would silently replace by DDP: for tests only.

As a launcher it runs any script under an FSDP launch file, over gloo:

    accelerate launch --config_file accelerate_configs/fsdp2.yaml --use_cpu --num_processes 2 \
        tests/distributed/fsdp_on_cpu.py recipes/pretrain_gpt2.py --optim mars_m
"""

import os
import runpy
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def enable() -> None:
    """Makes accelerate take an FSDP plugin on several CPU processes as it takes it on several GPUs."""
    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        # Only Accelerator passes the plugin, and only its first one finds the state undecided.
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: fsdp_on_cpu.py SCRIPT [ARGUMENT ...]")
    enable()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
