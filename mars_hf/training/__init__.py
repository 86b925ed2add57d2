"""MARS in the Hugging Face Trainer."""

from mars_hf.training.arguments import MARSArguments, MARSTrainingArguments
from mars_hf.training.registration import register
from mars_hf.training.trainer import MARSTrainer, MARSTrainerMixin

__all__ = ["MARSArguments", "MARSTrainer", "MARSTrainerMixin", "MARSTrainingArguments", "register"]
