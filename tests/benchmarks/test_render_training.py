"""Tables of direct training: the best rate by the validation text, differences seed by seed."""

from benchmarks.render_training import best_rows, memory_table, quality_table, update_table


PROTOCOL = {"steps": {"0.3M": [400]}, "rates": [0.001, 0.003], "seeds": [0, 1], "methods": ["fp32", "dqt-8", "dqt-4"]}
ROWS = {
    "0.3M/400/fp32/0.001/seed0": {"validation": 2.0, "test": 1.90},
    "0.3M/400/fp32/0.003/seed0": {"validation": 2.1, "test": 1.80},
    "0.3M/400/fp32/0.001/seed1": {"validation": 2.0, "test": 2.00},
    "0.3M/400/dqt-8/0.001/seed0": {"validation": 2.2, "test": 2.2, "changed_rate": [0.5, 0.1, 0.01]},
    "0.3M/400/dqt-8/0.003/seed0": {"validation": 2.1, "test": 1.95, "changed_rate": [0.5, 0.2, 0.01]},
    "0.3M/400/dqt-8/0.003/seed1": {"validation": 2.1, "test": 2.01, "changed_rate": [0.5, 0.2, 0.01]},
    "0.3M/400/dqt-4/0.001/seed0": {"validation": 2.1, "test": 1.95},
}


def test_quality():
    lines = quality_table({"protocol": PROTOCOL, "rows": ROWS}).splitlines()
    assert lines[2] == "| float32 | 0.001 | 2 | 1.950 |  | 0.100 |  |"
    assert lines[3] == "| 8 bits | 0.003 | 2 | 1.980 | +0.030 | 0.060 | 20.00 % |"
    assert len(lines) == 4, "a method whose rates are not all measured is left out"


def test_rates_are_chosen_without_the_test_text():
    rates = {method: rate for _, _, method, rate, _ in best_rows({"protocol": PROTOCOL, "rows": ROWS})}
    assert rates == {"fp32": 0.001, "dqt-8": 0.003}


def test_memory():
    row = {
        "linear_bytes_per_parameter": {"weights": 1.0, "gradients": 2.0, "states": 2.02},
        "linear_total": 5.02, "whole_total_mib": 672.4, "peak_rss_mib": 1642,
    }  # fmt: skip
    assert memory_table({"rows": {"x": row}}).splitlines()[-1] == "| x | 1.00 | 2.00 | 2.02 | 5.02 | 672 | 1642 |"


def test_updates_and_steps():
    figures = {"fused AdamW": {"ns": 1.0, "ratio": 1.0}, "adamw, 8-bit states": {"ns": 2.1, "ratio": 2.1}}
    step = {"fp32 AdamW": {"seconds": 4.0, "ratio": 1.0}, "8 bits": {"seconds": 4.1, "ratio": 1.025}}
    lines = update_table(
        {"rows": {"update/8/bf16": {"figures": figures}, "step/8 bits": {"figures": step}}}
    ).splitlines()
    assert lines[0] == "| stored bits | gradients | adamw, 8-bit states |" and lines[2] == "| 8 | bf16 | 2.10 |"
    assert lines[-1] == "| 8 bits | SmolLM2-135M | 1.02 |"
