"""Words of speech: how errors are counted, and that a converted file is read array by array."""

import struct
import wave

import numpy as np
import pytest
import torch

from benchmarks.speech import WORDS, normal, read, word_errors


def test_numbers_and_punctuation_are_not_errors():
    assert normal("Mr. John: 10 of clubs!") == ["mister", "john", "ten", "of", "clubs"]
    assert all(normal(words) == words.split() for words in WORDS.values())


@pytest.mark.parametrize(("heard", "said", "errors"), [
    ("a b c", "a b c", 0), ("a x c", "a b c", 1), ("a c", "a b c", 1), ("a b b c", "a b c", 1), ("", "a b", 2),
    ("b a", "a b", 2),
])  # fmt: skip
def test_word_errors(heard, said, errors):
    assert word_errors(heard.split(), said.split()) == errors


def test_other_sound_is_refused(tmp_path):
    with wave.open(str(tmp_path / "x.wav"), "wb") as file:
        file.setparams((2, 2, 16_000, 0, "NONE", ""))
        file.writeframes(b"\0" * 8)
    with pytest.raises(ValueError, match="not 16 kHz, one channel, 16 bits"):
        read(tmp_path / "x.wav")


def test_arrays_of_a_converted_model(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend("scripts")
    from convert_whisper import read_arrays

    def text(name):
        return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"

    weights, flag = np.arange(6, dtype=np.float16).reshape(2, 3), np.array(1, np.int8)
    content = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, 2)
    for name, kind, values in (("a/weight", 4, weights), ("flag", 1, flag)):
        content += text(name) + struct.pack("<B", values.ndim) + struct.pack(f"<{values.ndim}I", *values.shape)
        content += struct.pack("<BI", kind, values.nbytes) + values.tobytes()
    (tmp_path / "model.bin").write_bytes(content)
    found = read_arrays(tmp_path / "model.bin")
    assert torch.equal(found["a/weight"], torch.from_numpy(weights)) and found["flag"].shape == ()
    (tmp_path / "model.bin").write_bytes(struct.pack("<I", 5) + content[4:])
    with pytest.raises(SystemExit, match="not WhisperSpec of version 6"):
        read_arrays(tmp_path / "model.bin")
