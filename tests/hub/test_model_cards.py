"""The cards in model_cards/ are what the template makes of the facts beside them, for every example that has one."""

import json

import pytest

from scripts.make_cards import CARDS, RUNS, render


@pytest.mark.parametrize("name", RUNS)
def test_card_is_that_of_its_facts(name):
    content = json.loads((CARDS / f"{name}.json").read_text(encoding="utf-8"))
    card = (CARDS / f"{name}.md").read_text(encoding="utf-8")
    assert card == render(content)
    assert content["example"].startswith(f"examples/{RUNS[name].example}")
    # no path of a machine, and a measured result
    assert "/tmp" not in card and "/root" not in card and "## Quality" in card


def test_nothing_else_lies_there():
    assert sorted(path.name for path in CARDS.iterdir()) == sorted(
        f"{name}.{kind}" for name in RUNS for kind in ("json", "md")
    )
