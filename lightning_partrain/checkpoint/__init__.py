"""Checkpoints that any layout, and plain Lightning, can load."""
