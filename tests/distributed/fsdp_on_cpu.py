"""FSDP2 on CPUs, which accelerate would silently replace by DDP: for tests only, also by the launcher on_cpu.py."""

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
