"""The comparison with llama.cpp: its model is the one we time; a source that changed is not patched blindly."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers import llama_cpp


gguf = pytest.importorskip("gguf")


def test_the_file_holds_the_model(tiny_llama, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    llama_cpp.write_gguf(model, "Q8_0", tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert {llama_cpp.gguf_name(name) for name in model.state_dict()} == {t.name for t in reader.tensors}
    by_name = {t.name: t for t in reader.tensors}
    for name in ("model.layers.1.mlp.down_proj.weight", "lm_head.weight"):
        found = by_name[llama_cpp.gguf_name(name)]
        values = torch.from_numpy(gguf.quants.dequantize(found.data, found.tensor_type))
        dense = model.get_parameter(name).float()
        assert (values - dense).norm() < 0.01 * dense.norm()
    assert reader.fields["llama.block_count"].contents() == 2


def test_the_source_is_repaired_once(tmp_path):
    file = tmp_path / "ggml" / "src" / llama_cpp.PATCHED
    file.parent.mkdir(parents=True)
    file.write_text(f"void f() {{\n{llama_cpp.LINE}\n}}\n")
    llama_cpp.repair(tmp_path)
    assert llama_cpp.PATCH + llama_cpp.LINE in file.read_text()
    file.write_text("void f() {}\n")
    with pytest.raises(RuntimeError, match="is not the file that this script repairs"):
        llama_cpp.repair(tmp_path)
