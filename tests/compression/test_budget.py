"""Sizes as users write them."""

import pytest

from hf_lowbit.compression.budget import cache_bytes, free_bytes, parse_budget


@pytest.mark.parametrize(("budget", "size"), [("60MB", 60_000_000), ("2GiB", 2 << 30), ("40%", 400), ("1.5 kb", 1500),
                                              (123, 123), ("77", 77), (" 3 MiB ", 3 << 20)])  # fmt: skip
def test_a_budget_is_read(budget, size):
    assert parse_budget(budget, 1000) == size


@pytest.mark.parametrize("budget", ["", "MB", "-3MB", "3 apples", "3ib", "3tb", "60M", "0", 0, -5, "0%"])
def test_nonsense_is_refused_by_name(budget):
    with pytest.raises(ValueError, match="`budget`="):
        parse_budget(budget, 1000)


@pytest.mark.parametrize("budget", [None, 1.5, True, [1]])
def test_other_types_are_refused(budget):
    with pytest.raises(TypeError, match="`budget`="):
        parse_budget(budget, 1000)


def test_keys_and_values_of_a_context():
    from transformers import LlamaConfig, ResNetConfig

    config = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    assert cache_bytes(config, 10) == 2 * 3 * 2 * 16 * 10 * 2
    assert cache_bytes(ResNetConfig(), 10) == 0


def test_this_machine_has_memory():
    assert free_bytes() > 1 << 20
