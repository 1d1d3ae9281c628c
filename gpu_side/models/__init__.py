"""Trained models as the engine's IR."""
