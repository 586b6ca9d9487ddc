"""Checks run one by one, whatever becomes of the others."""

from collections.abc import Iterator

from lightrl.doctor.findings import Finding, findings_of, judged, ok


def check_first() -> Iterator[Finding]:
    yield ok("first", "fine")
    raise OSError("no such device")


def check_second() -> Iterator[Finding]:
    yield judged("second", "slow", warns=True, remedy="Wait.")


def test_a_check_that_breaks_is_a_finding_and_the_others_run() -> None:
    first, broken, second = findings_of([check_first, check_second])
    assert first == Finding("first", "ok", "fine", "")
    assert (broken.check, broken.verdict) == ("check first", "fail")
    assert broken.found.startswith("the check itself failed: OSError: no such device (")
    assert second == Finding("second", "warning", "slow", "Wait.")


def test_a_remedy_is_told_where_one_is_needed() -> None:
    assert judged("a", "b", remedy="c").remedy == ""
    assert judged("a", "b", fails=True, warns=True, remedy="c") == Finding("a", "fail", "b", "c")
