"""Block-sparse training: the schedule, prune-and-grow on a model's weights, and the callback for any Trainer."""
