"""The table of docs/interop.md: which scheme each export holds, found by exporting. `python -m tests.exports.matrix`
writes it into the page."""

import re
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_lowbit as lb


PAGE = Path(__file__).parents[2] / "docs/interop.md"
MARKS = "<!-- exports: begin -->\n", "<!-- exports: end -->\n"
FORMATS = ("compressed-tensors", "gemma", "gguf", "bitnet")
# rows of 96 and 64 weights
SCOPES = {32: "groups", None: "channel", "tensor": "tensor"}
WIDTHS = [
    ("ternary", True),
    (2, True),
    (2, False),
    (3, True),
    (3, False),
    (4, True),
    (4, False),
    (8, True),
    (8, False),
]


def dense(dtype):
    """A Llama of one layer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=256)).to(dtype)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only)


def outcome(scheme, format, dtype):
    """ "exact", "close" or "refused"."""
    model = lb.quantize(dense(dtype), lb.LowBitConfig(modules={"re:.*layers.*": scheme}))
    with tempfile.TemporaryDirectory() as folder:
        activations = "float" if format in ("compressed-tensors", "gemma") else None
        try:
            result = lb.export(model, Path(folder) / "out", format, activations=activations, tokenizer=tokenizer())
        except ValueError as error:
            assert "can't hold this model" in str(error)
            return "refused"
    return "exact" if result.exact else "close"


def table():
    lines = [f"| bits | scales | zero points | {' | '.join(FORMATS)} |", f"|{'---|' * (3 + len(FORMATS))}"]
    for bits, symmetric in WIDTHS:
        for scope, name in SCOPES.items():
            scheme = lb.Scheme(bits, scope, symmetric, "int8" if bits == "ternary" else "float")
            cells = []
            for format in FORMATS:
                single, half = (outcome(scheme, format, dtype) for dtype in (torch.float32, torch.bfloat16))
                cells.append(single if single == half else f"{single}; bfloat16 {half}")
            lines.append(f"| {bits} | {name} | {'no' if symmetric else 'yes'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def stored():
    """The table as the page has it."""
    begin, end = MARKS
    return re.search(f"{begin}(.*){end}", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]


if __name__ == "__main__":
    begin, end = MARKS
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(f"{begin}{stored()}{end}", f"{begin}{table()}{end}"), encoding="utf-8")
