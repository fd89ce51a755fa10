"""Files on disk: what a checkpoint holds, byte for byte, and where a model name leads.

Knows file formats and places. Refuses to know devices, models and matmuls; imports no torch.
"""

from tradewind.weights.checkpoint import Checkpoint, CheckpointError, RawTensor, open_checkpoint
from tradewind.weights.lookup import PACKAGED, find_model

__all__ = ["PACKAGED", "Checkpoint", "CheckpointError", "RawTensor", "find_model", "open_checkpoint"]
