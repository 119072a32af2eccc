"""What host functions print, in lines: those of a second up to a number, and how much more there was."""

from __future__ import annotations

from pathways_ray.executor.calls.printed import MAX_LINE, MAX_LINES, Printed


def test_lines_come_whole_however_they_are_read() -> None:
    printed = Printed()
    assert printed.lines(b"one\ntw", 0.0) == ["one"]
    assert printed.lines(b"o\n\nthree", 0.1) == ["two", ""]
    assert printed.lines(b"", 0.2) == ["three"]
    assert printed.lines(b"", 0.3) == []


def test_a_long_line_is_cut_and_odd_bytes_are_shown() -> None:
    printed = Printed()
    found = printed.lines(b"x" * (2 * MAX_LINE + 5) + b"\xff\n", 0.0)
    assert [len(line) for line in found] == [MAX_LINE, MAX_LINE, 6]
    assert found[-1].endswith("\ufffd")


def test_a_flood_is_left_out_and_counted_until_the_second_is_over() -> None:
    printed = Printed()
    assert printed.lines(b"a\n" * (MAX_LINES + 3), 0.0) == ["a"] * MAX_LINES
    assert printed.lines(b"b\n" * 1000, 0.5) == []
    said = f"({6 + 2000} bytes more were printed; {MAX_LINES} lines a second are logged)"
    assert printed.lines(b"c\n", 1.0) == [said, "c"]
    assert printed.lines(b"d\n" * MAX_LINES, 1.2) == ["d"] * (MAX_LINES - 1)
    assert printed.lines(b"", 1.3)[0].startswith("(2 bytes more")
