"""What DeepSpeed needs around its engine: compiled ops, settings, and memory that is read out of it."""
