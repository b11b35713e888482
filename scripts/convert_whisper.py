"""Turn the CTranslate2 files of Whisper tiny.en into an ordinary Hugging Face folder, float16 as published.

    python scripts/convert_whisper.py FOLDER_WITH_MODEL_BIN OUTPUT      # writes OUTPUT/huggingface

model.bin is a table of named arrays in little-endian order (CTranslate2, binary version 6): version, name of the
specification, revision, number of arrays; of each array name, rank, dimensions, type, bytes, data; then aliases. Names
carry a length of 16 bits that counts a closing zero. Projections of one input lie in one array there (q, k and v of
self-attention, k and v of cross-attention) and are taken apart.
"""

import argparse
import json
import os
import struct
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from convert_smollm2 import save
from torch import Tensor
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizerFast,
)


VERSION = 6
# types of arrays by number; whole numbers are settings, not weights
TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
LAYERS, WIDTH, HEADS = 4, 384, 6
END, START, BEFORE, NO_TIMES = 50256, 50257, 50360, 50362


class Reader:
    """Numbers and strings of a file, one after the other."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def number(self, kind: str) -> int:
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += struct.calcsize(kind)
        return value

    def string(self) -> str:
        size = self.number("H")
        self.at += size
        return self.data[self.at - size : self.at - 1].decode()

    def array(self) -> tuple[str, Tensor]:
        name = self.string()
        shape = [self.number("I") for _ in range(self.number("B"))]
        kind, size = np.dtype(TYPES[self.number("B")]), self.number("I")
        values = np.frombuffer(self.data, kind, size // kind.itemsize, self.at).reshape(shape)
        self.at += size
        return name, torch.from_numpy(values.copy())


def read_arrays(path: Path) -> dict[str, Tensor]:
    reader = Reader(path.read_bytes())
    version, specification, _ = reader.number("I"), reader.string(), reader.number("I")
    if (version, specification) != (VERSION, "WhisperSpec"):
        raise SystemExit(f"{path} is {specification} of version {version}, not WhisperSpec of version {VERSION}.")
    return dict(reader.array() for _ in range(reader.number("I")))


def state_dict(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays under the names of `WhisperForConditionalGeneration`."""
    found: dict[str, Tensor] = {}

    def linear(name: str, source: str) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = arrays[f"{source}/weight"], arrays[f"{source}/bias"]

    def norm(name: str, source: str) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = arrays[f"{source}/gamma"], arrays[f"{source}/beta"]

    def projections(name: str, source: str, parts: str) -> None:
        """One array of several projections; k has no bias in this model."""
        weights, biases = (arrays[f"{source}/{kind}"].chunk(len(parts)) for kind in ("weight", "bias"))
        for part, weight, bias in zip(parts, weights, biases, strict=True):
            found[f"{name}.{part}_proj.weight"] = weight.clone()
            if part != "k":
                found[f"{name}.{part}_proj.bias"] = bias.clone()

    for side in ("encoder", "decoder"):
        for index in range(LAYERS):
            name, source = f"model.{side}.layers.{index}", f"{side}/layer_{index}"
            projections(f"{name}.self_attn", f"{source}/self_attention/linear_0", "qkv")
            linear(f"{name}.self_attn.out_proj", f"{source}/self_attention/linear_1")
            norm(f"{name}.self_attn_layer_norm", f"{source}/self_attention/layer_norm")
            if side == "decoder":
                linear(f"{name}.encoder_attn.q_proj", f"{source}/attention/linear_0")
                projections(f"{name}.encoder_attn", f"{source}/attention/linear_1", "kv")
                linear(f"{name}.encoder_attn.out_proj", f"{source}/attention/linear_2")
                norm(f"{name}.encoder_attn_layer_norm", f"{source}/attention/layer_norm")
            linear(f"{name}.fc1", f"{source}/ffn/linear_0")
            linear(f"{name}.fc2", f"{source}/ffn/linear_1")
            norm(f"{name}.final_layer_norm", f"{source}/ffn/layer_norm")
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        found[f"model.{side}.embed_positions.weight"] = arrays[f"{side}/position_encodings/encodings"]
    for convolution in ("conv1", "conv2"):
        linear(f"model.encoder.{convolution}", f"encoder/{convolution}")
    found["model.decoder.embed_tokens.weight"] = arrays["decoder/embeddings/weight"]
    # the output layer shares it
    found["proj_out.weight"] = arrays["decoder/embeddings/weight"]
    return found


def build(source: Path) -> tuple[WhisperForConditionalGeneration, WhisperProcessor]:
    settings = json.loads((source / "config.json").read_text())
    arrays = read_arrays(source / "model.bin")
    sides = {f"{side}_{what}": value for side in ("encoder", "decoder")
             for what, value in (("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", 4 * WIDTH))}  # fmt: skip
    tokens = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": START}
    vocabulary = len(arrays["decoder/embeddings/weight"])
    config = WhisperConfig(vocab_size=vocabulary, num_mel_bins=80, d_model=WIDTH, max_source_positions=1500,
                           max_target_positions=448, **sides, **tokens)  # fmt: skip
    model = WhisperForConditionalGeneration(config).half()
    model.load_state_dict(state_dict(arrays))
    model.tie_weights()
    model.generation_config = GenerationConfig(
        **tokens, max_length=448, suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"], alignment_heads=settings["alignment_heads"],
        is_multilingual=False, return_timestamps=False, no_timestamps_token_id=NO_TIMES, prev_sot_token_id=BEFORE,
    )  # fmt: skip
    end = "<|endoftext|>"
    tokenizer = WhisperTokenizerFast(
        tokenizer_file=str(source / "tokenizer.json"), bos_token=end, eos_token=end, pad_token=end, unk_token=end
    )
    return model, WhisperProcessor(WhisperFeatureExtractor(feature_size=80), tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    folder = arguments.output / "huggingface"
    if not folder.exists():
        save(*build(arguments.source), folder)


if __name__ == "__main__":
    main()
