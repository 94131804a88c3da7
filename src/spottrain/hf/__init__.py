"""What models of Hugging Face transformers need for a ``TrainingJob``."""

from spottrain.hf.examples import Packed, chat_example
from spottrain.hf.losses import IGNORED, causal_lm_loss, masked_lm_loss
from spottrain.hf.trainer import from_trainer

__all__ = [
    "IGNORED",
    "Packed",
    "causal_lm_loss",
    "chat_example",
    "from_trainer",
    "masked_lm_loss",
]
