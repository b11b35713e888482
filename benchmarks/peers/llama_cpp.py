"""llama.cpp beside `generate()`: `python -m benchmarks.peers.llama_cpp`; builds llama-cpp-python where it is missing.

    decode, prefill    as in `benchmarks.generate`; llama.cpp evaluates the same tokens, one thread, without sampling
    ratio              median over the turns of seconds(bfloat16, eager, transformers) / seconds(llama.cpp)

The build takes a compiler, cmake and up to twenty minutes, and goes to a folder of the cache, not the environment.
Models are written as GGUF from the same checkpoints that `benchmarks.generate` reads, every matrix in one type (in
TQ2_0 the table is Q4_0): only speed is read off, so channels of queries and keys stay in transformers' order and the
tokenizer holds placeholders. TQ2_0 needs rows of a multiple of 256, which SmolLM2 has not.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.decode import comparison, timed
from benchmarks.generate import MODELS, PROMPT, STEPS, TURNS, dense_folder, load
from benchmarks.record import Record, is_quiet, stream_gb_per_s, watch


RELEASE = "llama-cpp-python==0.3.36"
FOLDER = Path(os.environ.get("HF_LOWBIT_CACHE") or Path.home() / ".cache" / "hf_lowbit") / "peers" / RELEASE
TYPES = ("Q4_0", "Q4_1", "Q8_0", "TQ2_0", "BF16")
# the compiler drops the stores to this struct, and the process dies of the instruction (ggml-org/llama.cpp #26954)
PATCHED, LINE = "ggml-cpu/amx/mmq.cpp", "    _tile_loadconfig(&tc);"
PATCH = '    asm volatile("" :: "r"(&tc) : "memory");\n'
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def build(folder: Path = FOLDER) -> None:
    """Download the source distribution, repair it, and install it into `folder`."""
    pip = [sys.executable, "-m", "pip"]
    with tempfile.TemporaryDirectory() as work:
        source = unpack(work, pip)
        repair(source)
        print(f"Building {RELEASE}: up to twenty minutes.", flush=True)
        options = {**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF"}
        subprocess.run([*pip, "install", "--no-deps", "--target", str(folder), str(source)], env=options, check=True)


def unpack(work: str, pip: list[str]) -> Path:
    name = RELEASE.split("==")[0]
    subprocess.run([*pip, "download", "--no-deps", "--no-binary", name, RELEASE, "-d", work], check=True)
    (archive,) = Path(work).glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(work, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


def repair(source: Path) -> None:
    """Keep the tile configuration from being optimized away."""
    (file,) = source.rglob(PATCHED)
    text = file.read_text()
    if text.count(LINE) != 1:
        raise RuntimeError(f"{PATCHED} of {RELEASE} is not the file that this script repairs; look at it by hand.")
    file.write_text(text.replace(LINE, PATCH + LINE))


def library():
    """The module `llama_cpp`; built first where it is not installed."""
    if not FOLDER.exists():
        build()
    sys.path.insert(0, str(FOLDER))
    import llama_cpp

    return llama_cpp


def write_gguf(model, kind: str, path: Path) -> None:
    """A Llama of transformers as GGUF, its matrices in the type `kind`."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    heads = config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.to(torch.float32).numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
            continue
        own = "Q4_0" if kind == "TQ2_0" and name == "model.embed_tokens.weight" else kind
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[own])
        writer.add_tensor(gguf_name(name), packed, raw_dtype=gguf.GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """transformers' name of a parameter -> GGUF's: model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    stem, _, suffix = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{suffix}"


def step_and_prefill(library, model, prompt: list[int]) -> tuple[float, float]:
    """Seconds of the median decode step and of the prompt."""
    model.reset()
    times = [time.perf_counter()]
    for tokens in (prompt, *([1] for _ in range(STEPS + 2))):
        model.eval(tokens)
        library.llama_synchronize(model.ctx)
        times.append(time.perf_counter())
    seconds = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return sorted(seconds[3:])[STEPS // 2], seconds[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--restart", action="store_true", help="forget earlier results")
    parser.add_argument("--build", action="store_true", help="build llama.cpp and stop")
    arguments = parser.parse_args()
    if arguments.build:
        build()
        return 0
    torch.set_num_threads(1)
    llama = library()
    record = Record("llama_cpp", {"release": RELEASE, "types": TYPES, "prompt": PROMPT, "turns": TURNS, "steps": STEPS,
                                  "threads": 1}, arguments.restart)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            dense = load(dense_folder(name, Path(folder)), "bf16", "bf16 head")
            for kind in TYPES:
                if f"{name} {kind}" in record.rows or (kind == "TQ2_0" and dense.config.hidden_size % 256):
                    continue
                path = Path(folder) / f"{name}-{kind}.gguf"
                write_gguf(dense, kind, path)
                measure(record, llama, dense, path, f"{name} {kind}")
                path.unlink()
    return 0


def measure(record: Record, llama, dense, path: Path, key: str) -> None:
    """One row, unless the machine is busy."""
    options = {"n_ctx": PROMPT + STEPS + 8, "n_batch": PROMPT, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    model = llama.Llama(model_path=str(path), **options)
    prompt = torch.randint(0, dense.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    step_and_prefill(llama, model, prompt[0].tolist())
    timed(dense, prompt, STEPS)
    decode, prefill = [], []
    with watch() as spent:
        stream = stream_gb_per_s()
        for _ in range(TURNS):
            clock = timed(dense, prompt, STEPS)
            step, first = step_and_prefill(llama, model, prompt[0].tolist())
            decode.append([sorted(clock.steps())[STEPS // 2], step])
            prefill.append([clock.prefill(), first])
    if not is_quiet(spent.others, stream):
        print(f"{key}: thrown away, the machine is busy ({spent.others:.1f} cores, {stream:.1f} GB/s)", flush=True)
        return
    rows = {"decode": comparison(decode), "prefill": comparison(prefill, PROMPT)}
    record.add(key, {part: {k: round(v, 2) for k, v in asdict(row).items()} for part, row in rows.items()})
    print(key, *(f"{part}: {row.after:.1f} tokens/s" for part, row in rows.items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
