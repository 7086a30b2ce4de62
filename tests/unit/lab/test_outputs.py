"""Files that commands write: checked before the work, whole or not at all, and named by errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.files import small_files

from dinfer.lab.outputs import check_file, write


def test_folders_are_made_and_nothing_else(tmp_path: Path) -> None:
    check_file(tmp_path / "new" / "folder" / "a.json")
    assert list(tmp_path.rglob("*")) == [tmp_path / "new", tmp_path / "new" / "folder"]


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for path, named, reason in (
        (tmp_path, tmp_path, "Is a directory"),
        (tmp_path / "file" / "a.json", tmp_path / "file", "Not a directory"),
        (tmp_path / "file" / "b" / "a.json", tmp_path / "file" / "b", "Not a directory"),
        (Path("/proc/a.json"), Path("/proc"), "No such file"),
    ):
        with pytest.raises(OSError, match=reason) as error:
            check_file(path)
        assert error.value.filename == str(named)
    check_file(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_full_disk_is_found_before_the_work_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write(path, "old")
    with small_files(100):
        for late in (lambda: check_file(path), lambda: write(path, "new" * 100)):
            with pytest.raises(OSError) as error:
                late()
            assert error.value.filename == str(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_link_and_a_device_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"
    check_file(Path("/dev/null"))
    write(Path("/dev/null"), "gone")
    assert Path("/dev/null").is_char_device()
