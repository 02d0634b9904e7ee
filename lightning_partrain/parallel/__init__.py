"""What changes the model: which rank holds which part of its parameters, gradients and optimizer state."""
