"""What compression costs a model of speech: Whisper tiny.en after `lb.compress`.

    python scripts/fetch_assets.py whisper && python -m benchmarks.compress_speech [--restart]

    word errors   of five sentences (benchmarks/speech.py) as `generate()` writes them down, greedy
    nats          mean over their tokens of the loss on what was really said
    divergence    mean over the same tokens of KL(dense || low-bit), in nats: what the words are too few to show

Groups of 64. Rows N/rtn round to N bits without data, N/gptq by GPTQ, N/stages with all stages; calibration is the
five commands of other speakers.

Writes benchmarks/results/compress_speech.json.
"""

import argparse

import torch
import torch.nn.functional as F
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from transformers.utils import logging

import hf_lowbit as lb
from benchmarks.record import Record
from benchmarks.speech import RATE, clips, normal, word_errors
from scripts.fetch_assets import ASSETS, locate


ROWS = [(8, "rtn"), (4, "rtn"), (4, "gptq"), (4, "stages"), (3, "rtn"), (3, "gptq"), (3, "stages")]


def inputs(processor, samples, words: str) -> dict[str, torch.Tensor]:
    """Sound, the decoder's inputs, and the tokens that should follow each of them, as a capitalised sentence."""
    tokenizer = processor.tokenizer
    # the start token, then "no timestamps", then words: what `generate` begins with
    start = [50257, 50362]
    text = tokenizer(f" {words.capitalize()}.", add_special_tokens=False)["input_ids"]
    ids = torch.tensor([*start, *text, tokenizer.eos_token_id])
    features = processor.feature_extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    return {"input_features": features, "decoder_input_ids": ids[None, :-1], "labels": ids[None, 1:]}


@torch.no_grad()
def measure(model, processor, rows: list, expected: list[torch.Tensor]) -> dict:
    """Figures of one model; `expected` are the dense model's log-probabilities, and are filled by the first call."""
    errors, words, nats, divergence, tokens = 0, 0, 0.0, 0.0, 0
    first = not expected
    for index, (row, said) in enumerate(rows):
        features = row["input_features"].to(model.dtype)
        heard = model.generate(input_features=features, max_new_tokens=60)
        text = processor.batch_decode(heard, skip_special_tokens=True)[0]
        errors += word_errors(normal(text), normal(said))
        words += len(normal(said))
        output = model(input_features=features, decoder_input_ids=row["decoder_input_ids"])
        # "no timestamps" is given, not predicted
        likely, labels = output.logits[0, 1:].float().log_softmax(-1), row["labels"][0, 1:]
        if first:
            expected.append(likely)
        nats += float(F.nll_loss(likely, labels, reduction="sum"))
        wanted = expected[index]
        divergence += float(F.kl_div(likely, wanted, reduction="sum", log_target=True))
        tokens += len(labels)
    return {"word_errors": errors, "words": words, "nats": nats / tokens, "divergence": divergence / tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true", help="throw the measured rows away")
    arguments = parser.parse_args()
    folder = locate("whisper")
    if folder is None:
        raise SystemExit("whisper is not on this machine; run `python scripts/fetch_assets.py whisper`.")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {"baseline": ASSETS["whisper"].baseline, "group_size": 64, "dtype": "float32", "text": "sentences",
                "calibration": "commands"}  # fmt: skip
    record = Record("compress_speech", protocol, restart=arguments.restart, timed=False)
    missing = [(bits, method) for bits, method in ROWS if f"{bits}/{method}" not in record.rows]
    print(f"{len(missing)} of {len(ROWS)} rows are missing, a minute each")
    processor = WhisperProcessor.from_pretrained(folder)
    dense = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [(inputs(processor, samples, words), words) for samples, words in clips("sentences")]
    calibration = [inputs(processor, samples, words) for samples, words in clips("commands")]
    calibration = [{name: row[name] for name in ("input_features", "decoder_input_ids")} for row in calibration]
    expected: list[torch.Tensor] = []
    record.add("dense", measure(dense, processor, rows, expected))
    print("dense", record.rows["dense"], flush=True)
    for bits, method in missing:
        stages = ("layer", "block", "global") if method == "stages" else ("layer",)
        data = None if method == "rtn" else calibration
        result = lb.compress(dense, bits=bits, calibration=data, stages=stages)
        size = {"bytes": result.report.total_bytes, "average": result.report.bits_per_weight}
        record.add(f"{bits}/{method}", {**measure(result.model, processor, rows, expected), **size})
        print(f"{bits}/{method}", record.rows[f"{bits}/{method}"], flush=True)


if __name__ == "__main__":
    main()
