"""The loopback Hub answers the real client as huggingface.co does, where our tests depend on it."""

import socket

import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session

from tests.hub_fixture import Hub
from tests.hub_state import READ_TOKEN, STRANGER_TOKEN


def upload(api, content=b"0123456789" * 2000, **options):
    return api.upload_file(path_or_fileobj=content, path_in_repo="data.txt", repo_id="me/repo", **options)


@pytest.fixture
def api(hub):
    client = HfApi()
    client.create_repo("me/repo")
    return client


@pytest.mark.parametrize("threshold", [0, None], ids=["lfs", "regular"])
def test_upload_and_download_round_trip(hub, api, threshold):
    hub.lfs_threshold = threshold
    upload(api)
    entry = hub.repo("me/repo").files()["data.txt"]
    assert entry.lfs is (threshold == 0)
    with open(hf_hub_download("me/repo", "data.txt"), "rb") as file:
        assert file.read() == entry.content


def test_existing_name_is_a_conflict_unless_allowed(api):
    with pytest.raises(HfHubHTTPError) as refused:
        api.create_repo("me/repo")
    assert refused.value.response.status_code == 409
    assert api.create_repo("me/repo", exist_ok=True).repo_id == "me/repo"


def test_a_name_without_namespace_belongs_to_the_token_owner(hub, api):
    assert api.create_repo("short").repo_id == "me/short"
    assert api.create_repo("my-lab/shared").repo_id == "my-lab/shared"


@pytest.mark.parametrize(
    ("token", "status"), [("hf_wrong", 401), (False, 401), (READ_TOKEN, 403), (STRANGER_TOKEN, 403)]
)
def test_writing_needs_a_token_that_may(hub, api, token, status):
    with pytest.raises(HfHubHTTPError) as refused:
        upload(api, token=token)
    assert refused.value.response.status_code == status


def test_private_repositories_do_not_exist_for_others(hub, api):
    api.create_repo("me/hidden", private=True)
    assert api.model_info("me/hidden").private
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("me/hidden", token=STRANGER_TOKEN)


def test_missing_things_are_told_apart(api):
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("me/repo", "nothing.txt")
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download("me/repo", "data.txt", revision="nowhere")
    with pytest.raises(RepositoryNotFoundError):
        hf_hub_download("me/nothing", "data.txt")


def test_branches_and_pull_requests_leave_main_alone(hub, api):
    api.create_branch("me/repo", branch="dev")
    upload(api, revision="dev")
    pull = upload(api, create_pr=True, token=STRANGER_TOKEN)
    assert "data.txt" not in hub.repo("me/repo").files()
    assert "data.txt" in hub.repo("me/repo").files("dev")
    assert "data.txt" in hub.repo("me/repo").files(pull.pr_revision)
    refs = api.list_repo_refs("me/repo", include_pull_requests=True)
    assert [branch.name for branch in refs.branches] == ["main", "dev"]
    assert [request.name for request in refs.pull_requests] == ["refs/pr/1"]


def test_files_can_be_listed_deleted_and_fetched_at_once(hub, api):
    upload(api)
    api.upload_file(path_or_fileobj=b"x", path_in_repo="folder/inner.txt", repo_id="me/repo")
    assert sorted(api.list_repo_files("me/repo")) == [".gitattributes", "data.txt", "folder/inner.txt"]
    api.delete_file("data.txt", "me/repo")
    assert "data.txt" not in hub.repo("me/repo").files()
    assert snapshot_download("me/repo", allow_patterns="folder/*")


def test_a_range_is_a_part_of_the_file(hub, api):
    upload(api, b"0123456789")
    url = f"{hub.endpoint}/me/repo/resolve/main/data.txt"
    part = get_session().get(url, headers={"Range": "bytes=3-5"})
    assert (part.status_code, part.content, part.headers["Content-Range"]) == (206, b"345", "bytes 3-5/10")
    assert get_session().get(url, headers={"Range": "bytes=99-"}).status_code == 416


def test_a_cut_upload_is_tried_again_by_the_client(hub, api):
    hub.lfs_threshold, hub.cut_uploads = 0, {1}
    upload(api)
    assert "data.txt" in hub.repo("me/repo").files()
    assert sum(request.startswith("PUT") for request in hub.requests) == 2


def test_a_cut_commit_changes_nothing_and_the_upload_is_not_repeated(hub, api):
    hub.lfs_threshold, hub.cut_commits = 0, {1}
    with pytest.raises(Exception, match="(?i)disconnected|reset|closed"):
        upload(api)
    assert "data.txt" not in hub.repo("me/repo").files()
    upload(api)
    assert "data.txt" in hub.repo("me/repo").files()
    assert sum(request.startswith("PUT") for request in hub.requests) == 1


def test_it_listens_on_loopback_only_and_ends_with_its_block(tmp_path):
    with Hub(tmp_path) as server:
        host, port = server.server.server_address
        assert host == "127.0.0.1"
    assert not server.thread.is_alive()
    with pytest.raises(OSError):
        socket.create_connection((host, port), timeout=5)


def test_another_process_takes_it_for_the_hub(hub, api):
    shown = hub.python("from huggingface_hub import HfApi; print(HfApi().whoami()['name'])")
    assert shown.strip() == "me"
