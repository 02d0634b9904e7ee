"""What compressed gradients gain on a slow link: loss curves on a fast one, step times on slow ones, and their product.

``python -m benchmarks.comm --help``. A way to train is a row (``rows.py``); every other file is the same for all of them.
"""
