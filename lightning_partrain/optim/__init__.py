"""Steps of optimizers that go with a way of exchanging gradients."""
