"""Layers that several ranks hold together: which are cut, how they compute, and the proof that they do it right."""
