"""`make cards`: run the examples, and write a model card and the facts it states for each model they make.

    python scripts/make_cards.py                 # all; minutes each on two cores
    python scripts/make_cards.py smollm2-135m-4bit

`model_cards/<name>.json` holds what was measured in the run, `model_cards/<name>.md` the card that the package's
template makes of it. A test renders the cards again from the facts, so that a change of the template shows in both.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_lowbit.hub import facts
from hf_lowbit.hub.card import card_of
from hf_lowbit.hub.origin import Origin


ROOT = Path(__file__).resolve().parents[1]
CARDS = ROOT / "model_cards"
NUMBER = r"(\d+\.\d+)"
# what the authors' own cards say of licence and language
SMOLLM2 = Origin("HuggingFaceTB/SmolLM2-135M-Instruct", False, {"license": "apache-2.0", "language": "en"})
MINILM = Origin("sentence-transformers/all-MiniLM-L6-v2", False, {"license": "apache-2.0", "language": "en"})
COPY = "the base is a dequantised Q4_1 copy whose channels are permuted"


@dataclass(frozen=True)
class Run:
    """An example with its settings. `results` reads the results of the card from what it printed."""

    example: str
    arguments: tuple[str, ...]
    base: Origin
    results: Callable[[str], list[dict]]


def perplexity(printed: str) -> list[dict]:
    before, after = map(float, re.search(rf"^perplexity +{NUMBER} +{NUMBER}", printed, re.M).groups())
    protocol = re.search(r"Perplexity: .*?, (\d+ windows of \d+ tokens from the start, .*?)\.$", printed, re.M)[1]
    return [{"metric_type": "perplexity", "metric_value": after, "baseline": before, "dataset_name":
             "Persuasion by Jane Austen", "protocol": f"{protocol}; {COPY}"}]  # fmt: skip


def similarity(printed: str) -> list[dict]:
    dense, lowbit = map(float, printed.split("8 bits\n", 1)[1].split()[:2])
    return [{"metric_type": "cosine_similarity", "metric_value": lowbit, "baseline": dense, "dataset_name":
             "two sentences of the authors' example", "protocol": "'A man is eating food.' beside 'A man is eating a "
             "piece of bread.', mean pooling"}]  # fmt: skip


RUNS = {
    "smollm2-135m-4bit": Run("compress_smollm2.py", ("--turns", "1"), SMOLLM2, perplexity),
    "minilm-l6-8bit": Run("encoder_similarity.py", ("--bits", "8"), MINILM, similarity),
}


def stored(name: str) -> dict:
    """Run the example; the facts of its card as JSON."""
    run = RUNS[name]
    with TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / run.example), *run.arguments, "--output", f"{folder}/out"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{run.example} failed:\n{done.stdout}{done.stderr}")
        measured = asdict(facts.from_checkpoint(Path(folder) / "out"))
    for group in measured["groups"]:
        group["names"] = sorted(group["names"])
    return {
        "example": f"examples/{run.example} {' '.join(run.arguments)}".strip(),
        "repo_id": f"hf_lowbit/{name}",
        "facts": measured,
        "base": asdict(run.base),
        "results": run.results(done.stdout),
    }


def render(content: dict) -> str:
    """The card of stored facts, as it is written to a README."""
    groups = []
    for group in content["facts"]["groups"]:
        blocks = group["blocks"]
        blocks = blocks and facts.Blocks(tuple(blocks["block"]), blocks["bits"], blocks["sparsity"])
        groups.append(facts.Group(**{**group, "names": set(group["names"]), "blocks": blocks}))
    measured = facts.Facts(content["facts"]["architecture"], content["facts"]["config"], groups)
    base = Origin(**content["base"])
    return str(card_of(measured, base, content["results"], content["repo_id"]))


def main(names: list[str]) -> None:
    unknown = set(names) - set(RUNS)
    if unknown:
        raise SystemExit(f"there is no card {sorted(unknown)[0]!r}; there are {', '.join(RUNS)}.")
    CARDS.mkdir(exist_ok=True)
    for name in names or RUNS:
        print(f"{name}: {RUNS[name].example}", flush=True)
        content = stored(name)
        (CARDS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (CARDS / f"{name}.md").write_text(render(content), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
