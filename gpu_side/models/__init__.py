"""Trained models as the engine's IR: `load_model`, `describe`, `check_graph`."""

from hyades.gpu_side.models.checks import check_graph
from hyades.gpu_side.models.describe import Description, describe
from hyades.gpu_side.models.ir import Model
from hyades.gpu_side.models.loader import load_model

__all__ = ["Description", "Model", "check_graph", "describe", "load_model"]
