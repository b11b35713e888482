"""Spoken sentences with their words: the Debian package pocketsphinx-testdata (recordings in the public domain).

`sentences` are five of *Sense and Sensibility*, read for LibriVox; `commands` five short ones by other people, cards
of a game. Both are 16 kHz, one channel.
"""

import re
import wave
from pathlib import Path

import numpy as np

from benchmarks.debian import Package


READ = "librivox/sense_and_sensibility_01_austen_64kb-0{}.wav"
CLIPS = Package("pocketsphinx-testdata", "usr/share/pocketsphinx/test/data", "pocketsphinx-testdata", {
    READ.format(870): "b0557cf95c974d930577e58e46b7f068c432a6e3afcc286563d88922b2a5315c",
    READ.format(880): "fbec491ef00ee734a67f0ee318e98c51c157b479e1629ff4f4426861ecac0414",
    READ.format(890): "5793ffbdee55fb8bfd284943a6866864c832d9d4accf2661cabd39915c84ee10",
    READ.format(920): "40882414ef4cc51f3ff7a63bad0c8c87e7f595ffeb8209fbf756c8ebc5c28a59",
    READ.format(930): "954adbf0b56ac8a148cbe77b39ca18d76b5f2a1e1f405565bd786ce3e68a68b7",
    "cards/001.wav": "899951e768666f27c8f8b1d4090b96fe7909cae9cec01bec0a5d5d1b8a8d566e",
    "cards/002.wav": "a3f9eae6fdb69a1231989e39a14d62388a6f52fb59666c76d95005318fadafec",
    "cards/003.wav": "00d283e46bc257ae479e4aa86593cadb541656eba1d19fc8abeece37f6a5a18b",
    "cards/004.wav": "4c44a8177f5b128b99f078cdeb918119933155574231f1833e8840d1af09c521",
    "cards/005.wav": "090f18f5f76cf8b2b43cd9e6b07823f4685a4742d9a36cd98b174a6586c18cf9",
})  # fmt: skip
RATE = 16_000
# what is said in each, in lower case
WORDS = {
    READ.format(870): "and mister john dashwood had then leisure to consider how much there might be prudently in his "
                      "power to do for them",
    READ.format(880): "he was not an ill disposed young man",
    READ.format(890): "unless to be rather cold hearted and rather selfish is to be ill disposed",
    READ.format(920): "had he married a more amiable woman he might have been made still more respectable than he was",
    READ.format(930): "he might even have been made amiable himself",
    "cards/001.wav": "ten of clubs",
    "cards/002.wav": "four queen of clubs",
    "cards/003.wav": "seven of clubs",
    "cards/004.wav": "five five",
    "cards/005.wav": "eight of spades four of clubs seven of hearts",
}  # fmt: skip
DIGITS = {"10": "ten", "4": "four", "7": "seven", "5": "five", "8": "eight", "mr": "mister"}


def read(path: Path) -> np.ndarray:
    """Samples between -1 and 1, float32 [T]."""
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
            raise ValueError(f"{path} is not 16 kHz, one channel, 16 bits.")
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def clips(kind: str) -> list[tuple[np.ndarray, str]]:
    """(samples, words) of the "sentences" or the "commands"."""
    folder, start = CLIPS.folder(), "librivox" if kind == "sentences" else "cards"
    return [(read(folder / name), words) for name, words in WORDS.items() if name.startswith(start)]


def normal(text: str) -> list[str]:
    """Words in lower case without punctuation, numbers as words."""
    return [DIGITS.get(word, word) for word in re.findall(r"[a-z0-9]+", text.lower().replace("-", " "))]


def word_errors(heard: list[str], said: list[str]) -> int:
    """Fewest substitutions, insertions and deletions between two lists of words."""
    row = list(range(len(said) + 1))
    for i, word in enumerate(heard, 1):
        previous, row[0] = row[0], i
        for j, other in enumerate(said, 1):
            previous, row[j] = row[j], min(previous + (word != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]
