"""The optimizer and its parameter groups; imports torch alone."""

from mars_hf.optim.mars import MARS
from mars_hf.optim.param_groups import mars_param_groups

__all__ = ["MARS", "mars_param_groups"]
