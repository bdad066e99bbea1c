"""A folder is a complete checkpoint or none, whatever was left in it."""

import json
from pathlib import Path

import pytest

from torchrec_ext.command.errors import UserError
from torchrec_ext.train import checkpoint_folder as folders


def _save(parent: Path, step: int) -> Path:
    partial = folders.begin(parent, step)
    (partial / "a").write_text("content")
    (partial / "b").write_text("")
    return folders.publish(partial, ["a", "b"])


def test_a_checkpoint_exists_when_it_is_published(tmp_path: Path) -> None:
    parent = tmp_path / "run" / "checkpoints"
    assert folders.complete(parent) == []
    partial = folders.begin(parent, 20)
    (partial / "a").write_text("content")
    assert folders.complete(parent) == [] and not folders.has(parent, 20)
    assert folders.publish(partial, ["a"]) == parent / "step-0000000020"
    assert folders.has(parent, 20)
    assert folders.complete(parent) == [parent / "step-0000000020"]
    assert not partial.exists()


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    saved = [_save(tmp_path, step) for step in (9, 10, 100)]
    assert folders.complete(tmp_path) == saved


def test_the_newest_are_kept(tmp_path: Path) -> None:
    saved = [_save(tmp_path, step) for step in range(1, 6)]
    folders.prune(tmp_path, keep=2)
    assert sorted(tmp_path.iterdir()) == saved[-2:]
    folders.prune(tmp_path, keep=2)
    assert sorted(tmp_path.iterdir()) == saved[-2:]


def test_leftovers_are_no_checkpoints_and_go_with_the_next_save(tmp_path: Path) -> None:
    first, second = _save(tmp_path, 1), _save(tmp_path, 2)
    second.rename(tmp_path / "step-0000000002.removed")
    (folders.begin(tmp_path, 3) / "a").write_text("half")
    others = [tmp_path / "notes.partial", tmp_path / "step-0000000007"]
    for other in others:
        other.mkdir()
    assert folders.complete(tmp_path) == [first]
    fourth = _save(tmp_path, 4)
    assert folders.complete(tmp_path) == [first, fourth]
    # What is not a save's is not touched.
    assert sorted(tmp_path.iterdir()) == sorted([first, fourth, *others])


def test_a_file_that_is_missing_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    partial = folders.begin(tmp_path, 1)
    with pytest.raises(UserError, match=r"partial/a is not there; .* hosts of all ranks share"):
        folders.publish(partial, ["a"])
    assert folders.complete(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a", "conten", "a has 6 bytes, expected 7"),
        ("a", None, "a: No such file or directory"),
        ("manifest.json", None, "manifest.json: No such file or directory"),
        ("manifest.json", "", "manifest.json is damaged"),
        ("manifest.json", "[]", "manifest.json is damaged"),
        ("manifest.json", json.dumps({"files": [1]}), "manifest.json is damaged"),
    ],
)
def test_damage_is_found(name: str, text: str | None, expected: str, tmp_path: Path) -> None:
    folder = _save(tmp_path, 1)
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    problem = folders.problem(folder)
    assert problem is not None and expected in problem
    assert folders.complete(tmp_path) == []


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    (_save(tmp_path, 1) / "a").write_text("other")
    folder = _save(tmp_path, 1)
    assert folders.problem(folder) is None
    assert list(tmp_path.iterdir()) == [folder]
