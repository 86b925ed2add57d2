"""What a rule may ask about a tensor that may be a shard, answered for each engine."""

from mars_hf.optim.sharding.base import Sharding
from mars_hf.optim.sharding.local import LocalTensors

__all__ = ["LocalTensors", "Sharding"]
