"""What crosses the replicas of a model: gradients, and later averaged parameters and outer steps."""
