from __future__ import annotations

from pathlib import Path

from dp_handshake.messages import CheckIn, Violation
from dp_handshake.protocol import Stage
from dp_handshake.state import Journal, Saved, load, read_journal, save

CHECK_IN = CheckIn(incarnation="a", pod="p", ip="10.0.0.1", launch="x", role="head", first_rank=0, ranks=1)


def test_what_was_saved_is_read_back_by_the_same_incarnation_only(tmp_path: Path) -> None:
    saved = Saved(
        incarnation="a",
        check_ins=[CHECK_IN],
        released_at=12.5,
        violations=[Violation(time=1, kind="K", message="m")],
        violation_count=9,
    )
    assert save(tmp_path / "state.json", saved)
    assert load(tmp_path / "state.json", incarnation="a") == saved
    assert load(tmp_path / "state.json", incarnation="b") is None


def test_a_missing_or_damaged_state_file_means_a_new_start(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert load(path, incarnation="a") is None
    for content in (b"", b'{"incarn', b"\xff", b"[]"):
        path.write_bytes(content)
        assert load(path, incarnation="a") is None


def test_the_rank_log_keeps_init_and_the_furthest_stages_and_survives_a_cut_last_line(tmp_path: Path) -> None:
    path = tmp_path / "ranks.log"
    journal = Journal(path)
    journal.write([(3, Stage.ASKED), (2, Stage.ASKED)])
    journal.write_init(b"\x82\x00\xff")
    journal.write([(3, Stage.CONNECTED)])
    journal.close()
    with path.open("ab") as file:
        file.write(b"99 4\nnonsense\ninit 8\n2 77\n1 \n\xff 1\n2 4")
    assert read_journal(path, size=5) == (bytes([0, 0, Stage.ASKED, Stage.CONNECTED, 0]), b"\x82\x00\xff")
    assert read_journal(tmp_path / "none", size=2) == (bytes([0, 0]), None)


def test_an_unwritable_directory_is_said_and_survived(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "ranks.log")
    journal.write([(1, Stage.ASKED)])
    journal.close()
    assert not save(tmp_path / "none" / "state.json", Saved(incarnation="a"))
