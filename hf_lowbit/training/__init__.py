"""Direct training: optimizers that move low-bit codes themselves, without a float copy of the weights.

rules (which direction) -> states (what is remembered, at how many bits) -> leaves (how a weight is moved) -> updater
(one step of all of them). `DQTCallback` brings it into any Trainer, `DQTOptimizer` into a loop of your own.
"""
