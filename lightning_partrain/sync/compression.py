"""What is compressed, how, and from when on: the options of a compressed exchange, checked."""

from __future__ import annotations

from copy import copy
from fnmatch import fnmatchcase

import torch
from torch import nn

from lightning_partrain.sync import compressors
from lightning_partrain.sync.compressors.base import Compressor, number
from lightning_partrain.sync.feedback import ErrorFeedback, NoFeedback


class Compression:
    """
    Args:
        compressor: a name (``bf16``, ``fp16``, ``int8``, ``int4``, ``powersgd``, ``topk``, ``randomk``, ``threshold``, ``sketch``, ``signsgd``,
            ``onebit``, ``adasum``), one with options, such as ``TopK(density=0.001)``, or ``auto``, which measures and chooses.
        start_step: so many backward passes that average gradients are exact before compression begins; skipped steps do not count.
        error_feedback: add what was not sent to the next gradient; ``None``: where the compressor needs it. Costs memory of the size of
            the gradients.
        min_compression_numel: smaller parameters are averaged as they are, as are, with most compressors, those of one dimension and embeddings,
            and what the compressor has no use for.
        dense_parameters: names of further ones, in which ``*`` stands for any part, such as ``["lm_head.*"]``.
        bucket_mb: so many MiB of gradients travel together, while the backward pass goes on.

    Raises:
        ValueError: for an option that cannot be.
    """

    def __init__(
        self,
        compressor: str | Compressor,
        start_step: int = 0,
        error_feedback: bool | None = None,
        min_compression_numel: int = 1024,
        dense_parameters: list[str] | None = None,
        bucket_mb: float = 4.0,
    ) -> None:
        #: ``None`` for "auto", which :meth:`taking` takes its choice.
        automatic = isinstance(compressor, str) and compressor.lower() == compressors.AUTO
        self.compressor = None if automatic else compressors.make(compressor)
        self.start_step = number("start_step", start_step, 0, float("inf"), whole=True)
        self.min_compression_numel = number("min_compression_numel", min_compression_numel, 0, float("inf"), whole=True)
        self.bucket_mb = number("bucket_mb", bucket_mb, 0, 2**20, low_open=True)
        if error_feedback is not None and not isinstance(error_feedback, bool):
            raise ValueError(f"error_feedback must be True, False or None, not {error_feedback!r}.")
        self.error_feedback = error_feedback
        listed = dense_parameters is None or isinstance(dense_parameters, list)
        if not listed or not all(isinstance(each, str) and each for each in dense_parameters or []):
            raise ValueError(
                f"dense_parameters must be a list of names of parameters, such as ['lm_head.*'], not {dense_parameters!r}."
            )
        self.dense_parameters = dense_parameters or []
        self.feedback()

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * 2**20)

    def taking(self, compressor: str | None) -> Compression:
        """The same with another compressor; ``None`` for exact averages."""
        other = copy(self)
        other.compressor = None if compressor is None else compressors.make(compressor)
        return other

    def feedback(self) -> NoFeedback:
        """
        Raises:
            ValueError: when the compressor's own rule is at odds with ``error_feedback``.
        """
        if self.compressor is None:
            return NoFeedback()
        own = self.compressor.own_feedback()
        if own is not None:
            if self.error_feedback is False:
                raise ValueError(
                    f"{self.compressor!r} remembers what it did not send: error_feedback=False is not possible."
                )
            return own
        wanted = self.compressor.feedback if self.error_feedback is None else self.error_feedback
        if wanted and not self.compressor.can_feed_back:
            raise ValueError(
                f"{self.compressor!r} does not know what it did not send: error_feedback=True is not possible."
            )
        return ErrorFeedback() if wanted else NoFeedback()

    def dense_names(self, module: nn.Module) -> set[str]:
        """The parameters that stay as they are by their name or kind.

        Raises:
            ValueError: for a pattern that no parameter has.
        """
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        dense: set[str] = set()
        for pattern in self.dense_parameters:
            found = [n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"*.{pattern}")]
            if not found:
                raise ValueError(
                    f"dense_parameters: {pattern!r} matches no parameter of {type(module).__name__}. It has {', '.join(names[:8])}"
                    f"{', ...' if len(names) > 8 else ''}."
                )
            dense.update(found)
        if self.compressor is None or not self.compressor.takes_embeddings:
            tables = {each.weight for each in module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))}
            dense |= {name for name, param in module.named_parameters(remove_duplicate=False) if param in tables}
        tied = {param for name, param in module.named_parameters(remove_duplicate=False) if name in dense}
        return {name for name, param in module.named_parameters(remove_duplicate=False) if param in tied}

    def takes(self, shape: torch.Size) -> bool:
        """Whether a parameter of this shape (on this rank) is compressed."""
        if self.compressor is None:
            return False
        large = shape.numel() >= max(1, self.min_compression_numel) and len(shape) >= self.compressor.least_dim
        return large and self.compressor.fits(shape)

    @classmethod
    def of(cls, given: str | Compressor | Compression | None) -> Compression | None:
        return given if given is None or isinstance(given, Compression) else cls(given)
