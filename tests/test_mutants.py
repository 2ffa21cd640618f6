"""The list of planted breaks fits the code; that each is caught is shown by scripts/nightly."""

from tests.runs import python


def test_every_planted_break_has_its_text_once_and_its_tests() -> None:
    done = python("scripts/mutants.py", "--check")
    assert done.returncode == 0, done.stdout
