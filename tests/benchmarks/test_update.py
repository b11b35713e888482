"""The benchmark of updates: what it times moves weights, and the float parameters have an optimizer of their own."""

import torch

from benchmarks import update


def test_updates_move_codes(monkeypatch):
    monkeypatch.setattr(update, "SHAPE", (16, 40))
    monkeypatch.setattr(update, "COUNT", 2)
    monkeypatch.setattr(update, "REPEATS", 2)
    optimizer = update.direct_update(4, 8, torch.bfloat16, "adamw")
    optimizer.step()
    assert sum(moved.changed for moved in optimizer.last_step.moved.values()) > 0
    found = update.measure_updates("ternary", "fp32")
    assert len(found) == 1 + len(update.RULES) * len(update.STATE_BITS)
    assert found["fused AdamW"]["ratio"] == 1.0
    assert all(row["ns"] > 0 for row in found.values())
