"""`push_to_hub` through the real client: what arrives, that it loads elsewhere, what is kept, what is refused."""

import copy
import json
import logging
import re
import struct

import pytest
import torch
from huggingface_hub import CommitInfo, ModelCard, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import hf_lowbit as lb
from tests.hub_state import READ_TOKEN, STRANGER_TOKEN


TOKENS = torch.arange(24).view(2, 12)
LOAD_ELSEWHERE = """
import sys
import _hf_lowbit_autoload  # what the installed .pth file does when the interpreter starts
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    torch.save(model(torch.arange(24).view(2, 12)).logits, sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(type(model.model.layers[0].mlp.up_proj).__name__, tokenizer("the cat").input_ids)
"""


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("threshold", [0, None], ids=["lfs", "regular"])
def test_a_pushed_model_loads_bit_equal_in_another_process(hub, lowbit, tokenizer, tmp_path, threshold):
    hub.lfs_threshold = threshold
    done = lb.push_to_hub(lowbit, "me/llama-w4", tokenizer)
    assert isinstance(done, CommitInfo) and done.oid == hub.repo("me/llama-w4").refs["main"]
    files = hub.repo("me/llama-w4").files()
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors", "report.json", "tokenizer.json",
            "tokenizer_config.json", "chat_template.jinja"} <= set(files)  # fmt: skip
    assert files["model.safetensors"].lfs is (threshold == 0)
    shown = hub.python(LOAD_ELSEWHERE, "me/llama-w4", tmp_path / "logits.pt")
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(lowbit))
    assert not shown.startswith("Linear ") and shown.rstrip().endswith("[3, 4]")


def test_it_is_one_commit(hub, lowbit):
    lb.push_to_hub(lowbit, "me/llama-w4", commit_message="First push")
    assert hub.repo("me/llama-w4").titles() == ["initial commit", "First push"]


def test_the_python_on_the_card_runs(hub, lowbit):
    lb.push_to_hub(lowbit, "me/llama-w4")
    text = hub.repo("me/llama-w4").text("README.md")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert '"me/llama-w4"' in block
    hub.python("import _hf_lowbit_autoload\n" + block + "assert model.hf_quantizer is not None")


def test_no_local_path_is_published(hub, lowbit, tokenizer, dense_folder):
    tokenizer.name_or_path = str(dense_folder)
    lb.push_to_hub(lowbit, "me/llama-w4", tokenizer)
    for name, entry in hub.repo("me/llama-w4").files().items():
        assert b"secret-base" not in entry.content and b"private-place" not in entry.content, name


def test_the_report_is_uploaded_as_data(hub, lowbit):
    lb.push_to_hub(lowbit, "me/llama-w4")
    report = json.loads(hub.repo("me/llama-w4").text("report.json"))
    assert report["total_parameters"] == lowbit.num_parameters()


def test_the_parameter_count_is_the_logical_one(hub, lowbit, dense_folder):
    dense = LlamaForCausalLM.from_pretrained(dense_folder).num_parameters()
    assert lowbit.num_parameters() == dense
    lb.push_to_hub(lowbit, "me/whole")
    lb.push_to_hub(lowbit, "me/sharded", max_shard_size="30KB")
    content = hub.repo("me/whole").files()["model.safetensors"].content
    (length,) = struct.unpack("<Q", content[:8])
    assert json.loads(content[8 : 8 + length])["__metadata__"]["total_parameters"] == str(dense)
    index = json.loads(hub.repo("me/sharded").text("model.safetensors.index.json"))
    assert index["metadata"]["total_parameters"] == dense
    assert f"| Parameters | {dense:,} |" in hub.repo("me/sharded").text("README.md")


def test_a_folder_can_be_pushed_and_stays_as_it_is(hub, lowbit, tokenizer, tmp_path):
    folder = tmp_path / "checkpoint"
    lowbit.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in ("optimizer.pt", "training_args.bin", "trainer_state.json", "events.log"):
        (folder / name).write_bytes(b"stays at home")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    lb.push_to_hub(str(folder), "me/llama-w4")
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert b"stays at home" not in [entry.content for entry in hub.repo("me/llama-w4").files().values()]
    loaded = AutoModelForCausalLM.from_pretrained("me/llama-w4")
    assert torch.equal(logits(loaded), logits(lowbit))


@pytest.mark.parametrize("shards", [("30KB", "50GB"), ("50GB", "30KB")], ids=["fewer", "more"])
def test_weights_of_an_earlier_push_do_not_stay_behind(hub, lowbit, dense_folder, tmp_path, shards):
    LlamaForCausalLM.from_pretrained(dense_folder).push_to_hub("me/llama", max_shard_size=shards[0])
    lb.push_to_hub(lowbit, "me/llama", max_shard_size=shards[1])
    files = hub.repo("me/llama").files()
    assert ("model.safetensors.index.json" in files) == (shards[1] == "30KB")
    loaded = AutoModelForCausalLM.from_pretrained("me/llama")
    assert torch.equal(logits(loaded), logits(lowbit))


def test_a_written_readme_is_kept_and_its_metadata_completed(hub, lowbit):
    written = "---\nlicense: mit\ntags:\n- mine\n---\n\n# My model\n\nWords of mine.\n"
    hub.add_repo("me/llama-w4", {"README.md": written})
    lb.push_to_hub(lowbit, "me/llama-w4", base_model="org/base", tags=["extra"])
    card = ModelCard(hub.repo("me/llama-w4").text("README.md"))
    assert card.text == "\n# My model\n\nWords of mine.\n"
    assert card.data.license == "mit" and card.data.base_model == "org/base"
    assert card.data.tags == ["mine", "low-bit", "quantized", "4-bit", "hf_lowbit", "extra"]


def test_a_second_push_renews_the_card(hub, lowbit, dense_folder):
    lb.push_to_hub(lowbit, "me/llama")
    config = lb.LowBitConfig(bits=2, group_size=32)
    lb.push_to_hub(AutoModelForCausalLM.from_pretrained(dense_folder, quantization_config=config), "me/llama")
    card = ModelCard(hub.repo("me/llama").text("README.md"))
    assert "2-bit" in card.data.tags and "4-bit" not in card.data.tags
    assert "stored in 2 bits" in card.text and "4 bits" not in card.text


@pytest.mark.parametrize("on_hub", [False, True], ids=["new", "existing"])
def test_the_readme_of_a_folder_is_used_unless_the_hub_has_one(hub, lowbit, tmp_path, on_hub, caplog):
    lowbit.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nFrom the folder.")
    if on_hub:
        hub.add_repo("me/llama", {"README.md": "From the Hub."})
    lb.push_to_hub(tmp_path, "me/llama")
    text = ModelCard(hub.repo("me/llama").text("README.md")).text.strip()
    assert text == ("From the Hub." if on_hub else "From the folder.")
    assert ("is not uploaded" in caplog.text) == on_hub


def test_private_means_private(hub, lowbit, tmp_path, caplog):
    lb.push_to_hub(lowbit, "me/hidden", private=True)
    assert hub.repo("me/hidden").private
    hub.add_repo("me/open")
    with caplog.at_level(logging.WARNING):
        lb.push_to_hub(lowbit, "me/open", private=True)
    assert "`private`=True is not applied" in caplog.text


def test_a_revision_is_a_branch_of_its_own(hub, lowbit):
    lb.push_to_hub(lowbit, "me/llama")
    commit = hub.repo("me/llama").refs["main"]
    with torch.no_grad():
        lowbit.model.norm.weight.mul_(2)
    lb.push_to_hub(lowbit, "me/llama", revision="louder")
    assert hub.repo("me/llama").refs["main"] == commit
    loaded = AutoModelForCausalLM.from_pretrained("me/llama", revision="louder")
    assert torch.equal(logits(loaded), logits(lowbit))


def test_a_pull_request_leaves_main_alone(hub, lowbit):
    hub.add_repo("org/theirs", {"README.md": "Their words."})
    done = lb.push_to_hub(lowbit, "org/theirs", create_pr=True, token=STRANGER_TOKEN)
    assert done.pr_revision == "refs/pr/1"
    assert list(hub.repo("org/theirs").files()) == ["README.md"]
    assert "model.safetensors" in hub.repo("org/theirs").files("refs/pr/1")
    assert "Their words." in hub.repo("org/theirs").text("README.md", "refs/pr/1")
    # files that are there already would make no commit
    changed = copy.deepcopy(lowbit)
    changed.lm_head.weight.data.neg_()
    lb.push_to_hub(changed, "org/theirs", revision=done.pr_revision, token=STRANGER_TOKEN, commit_message="More")
    assert hub.repo("org/theirs").titles()[-1] == "More" and len(hub.repo("org/theirs").refs) == 2


def test_a_push_that_broke_off_is_resumed_by_pushing_again(hub, lowbit):
    hub.lfs_threshold, hub.cut_commits = 0, {1}
    with pytest.raises(Exception, match="(?i)disconnected|reset|closed"):
        lb.push_to_hub(lowbit, "me/llama")
    assert "config.json" not in hub.repo("me/llama").files()
    arrived = set(hub.lfs)
    lb.push_to_hub(lowbit, "me/llama")
    repeated = [r for r in hub.requests if r.startswith("PUT") and r.removeprefix("PUT /lfs/") in arrived]
    assert len(repeated) == len(arrived)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("me/llama")), logits(lowbit))


@pytest.mark.parametrize("token", [None, True, False], ids=["none", "stored", "off"])
def test_without_a_login_the_remedy_is_named_before_any_work(hub, lowbit, monkeypatch, token):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(LocalTokenNotFoundError, match="hf auth login"):
        lb.push_to_hub(lowbit, "me/llama", token=token)
    assert hub.repos == {} and hub.requests == []


@pytest.mark.parametrize(
    ("repo_id", "token", "remedy"),
    [
        ("me/llama", "hf_wrong", "does not accept the token"),
        ("me/llama", READ_TOKEN, "may not write"),
        ("org/llama", None, "may not write"),
    ],
    ids=["invalid", "read-only", "foreign"],
)
def test_a_refusal_starts_with_what_to_do(hub, lowbit, repo_id, token, remedy):
    with pytest.raises(HfHubHTTPError, match=f"^cannot push to `{repo_id}`: .*{remedy}"):
        lb.push_to_hub(lowbit, repo_id, token=token)


@pytest.mark.parametrize("repo_id", ["datasets/me/data", "a/b/c", "../up", None])
def test_an_impossible_repo_id_is_refused(hub, lowbit, repo_id):
    with pytest.raises(ValueError, match="not of the form .*(datasets)?"):
        lb.push_to_hub(lowbit, repo_id)
    assert hub.requests == []


def test_a_data_set_of_the_same_name_is_not_touched(hub, lowbit):
    hub.add_repo("me/thing", {"data.txt": "rows"}, type="dataset")
    lb.push_to_hub(lowbit, "me/thing")
    assert list(hub.repo("me/thing", "dataset").files()) == ["data.txt"]
    assert "model.safetensors" in hub.repo("me/thing").files()


def test_what_is_not_a_low_bit_model_is_refused_before_any_request(hub, lowbit, dense_folder, tmp_path):
    with pytest.raises(ValueError, match="not a low-bit model"):
        lb.push_to_hub(LlamaForCausalLM.from_pretrained(dense_folder), "me/llama")
    with pytest.raises(FileNotFoundError, match="not a folder"):
        lb.push_to_hub("no/such/folder", "me/llama")
    with pytest.raises(ValueError, match="create_pr"):
        lb.push_to_hub(lowbit, "me/llama", revision="dev", create_pr=True)
    assert hub.requests == []


def test_a_broken_readme_on_the_hub_stops_the_push_and_says_so(hub, lowbit):
    hub.add_repo("me/llama", {"README.md": "---\nlicense: [mit\n---\ntext"})
    with pytest.raises(ValueError, match="metadata block that cannot be read"):
        lb.push_to_hub(lowbit, "me/llama")
    assert list(hub.repo("me/llama").files()) == ["README.md"]


def test_files_reach_a_reader_through_the_cache(hub, lowbit):
    lb.push_to_hub(lowbit, "me/llama")
    with open(hf_hub_download("me/llama", "README.md"), encoding="utf-8") as file:
        assert file.read() == hub.repo("me/llama").text("README.md")
