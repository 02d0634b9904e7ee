"""Count-based byte models of order 0, 1 and 2: what a language model has to beat on the same text.

``python examples/byte_models.py``
"""

import torch
from torch import Tensor

VOCABULARY = 256  # byte values


def ngrams(text: Tensor, order: int) -> Tensor:
    """Every run of ``order + 1`` bytes as one number in base 256, (bytes - order,) int64."""
    length = len(text) - order
    index = torch.zeros(length, dtype=torch.int64)
    for shift in range(order + 1):
        index = index * VOCABULARY + text[shift : shift + length]
    return index


def next_byte_probabilities(text: Tensor, order: int) -> Tensor:
    """Probability of a byte after each ``order`` bytes, (256 ** order, 256), by Witten-Bell interpolation.

    Each order leans on the one below as if it had been seen once per distinct byte that followed the context;
    below order 0 lies the uniform distribution.
    """
    if order < 0:
        return torch.full((1, VOCABULARY), 1 / VOCABULARY)
    lower = next_byte_probabilities(text, order - 1)
    counts = torch.bincount(ngrams(text, order), minlength=VOCABULARY ** (order + 1)).view(-1, VOCABULARY).float()
    distinct = (counts > 0).sum(dim=1, keepdim=True).clamp(min=1)
    lower = lower.repeat(len(counts) // len(lower), 1)
    return (counts + distinct * lower) / (counts.sum(dim=1, keepdim=True) + distinct)


def bits_per_byte(train_text: Tensor, val_text: Tensor, order: int) -> float:
    """Cross-entropy in bits per byte on ``val_text`` of the model counted on ``train_text``, both (bytes,) uint8."""
    probabilities = next_byte_probabilities(train_text, order).flatten()
    return -probabilities[ngrams(val_text, order)].log2().mean(dtype=torch.float64).item()


if __name__ == "__main__":
    from gpt import StdlibText

    data = StdlibText()
    data.setup()
    print(f"{len(data.train_text):,} training bytes, {len(data.val_text):,} validation bytes")
    for order in range(3):
        print(f"order {order}: {bits_per_byte(data.train_text, data.val_text, order):.3f} bits per byte")
