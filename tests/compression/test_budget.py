"""The memory of this machine, less what inference needs."""

from hf_lowbit.compression.budget import cache_bytes, free_bytes


def test_keys_and_values_of_a_context():
    from transformers import LlamaConfig, ResNetConfig

    config = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    assert cache_bytes(config, 10) == 2 * 3 * 2 * 16 * 10 * 2
    assert cache_bytes(ResNetConfig(), 10) == 0


def test_this_machine_has_memory():
    assert free_bytes() > 1 << 20
