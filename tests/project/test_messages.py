"""Each message of the package is on the page for troubleshooting, and a test produces it."""

from __future__ import annotations

from tests.project.messages import (
    PAGE,
    WRITE,
    messages_in,
    messages_of_the_package,
    notes,
    section_of,
    sections,
    without_test,
    written,
)


NOT_RECOGNIZED = {
    "--... is for ..., found ...": "too few words: tests/project/test_cli.py has it",
    "... (one of ...) differs between ..., which must hold the same bits. A callback or hook changed weights on one "
    "rank only, or a device computes wrongly.": "two processes: tests/distributed/test_transition_faults.py has it",
    "... is damaged: ...": "all of its words are in others: tests/distributed/test_resume.py damages every file",
    "... is damaged: ... cannot be read (...).": "as above",
    "... is damaged: ... cannot be read (...: ...).": "as above, and tests/state/test_trainers_checkpoints.py",
    "... is damaged: ... has other content than was written (...).": "as above, by flipped bits",
    "... is damaged: ...: ...": "as above, and tests/state/test_resumption.py",
    "--... : expected a positive number.": "too few words: tests/startup/test_run_plan.py has it",
    "activation_cache_views=... has no effect: ...": "tests/data/test_augmentation_slots.py has it with each reason",
    "found ... as ..., expected ...": "too few words: tests/state/test_resumption.py has it for every field",
    "found no ...": "too few words: tests/state/test_resumption.py has it",
}
"""Messages that no test names by words that no other message has, and where they are produced all the same.

Write a test that does rather than an entry here.
"""

MOST_NOT_RECOGNIZED = 11


def test_the_text_of_every_message_is_known() -> None:
    """Write the text where it is raised or logged, or name the function that makes it in tests/project/messages.py."""
    assert messages_of_the_package().unknown == []


def test_every_message_has_a_section() -> None:
    """Name its file in the comment of a section of docs/troubleshooting.md."""
    heads = sections(PAGE.read_text(encoding="utf-8"))
    found = messages_of_the_package().messages
    assert [message.place for message in found if section_of(message.place, heads) is None] == []


def test_sections_name_places_of_messages() -> None:
    page = PAGE.read_text(encoding="utf-8")
    places = [message.place for message in messages_of_the_package().messages]
    starts = [start for head in sections(page) for start in head.split()]
    assert [start for start in starts if not any(place.startswith(start) for place in places)] == []


def test_the_page_has_the_messages_of_the_package() -> None:
    page = PAGE.read_text(encoding="utf-8")
    now = {message.words for message in messages_of_the_package().messages}
    missing, gone = sorted(now - set(notes(page))), sorted(set(notes(page)) - now)
    assert (missing, gone) == ([], []), f"run `{WRITE}`"
    assert written(page) == page, f"run `{WRITE}`"


def test_every_message_is_produced_by_a_test() -> None:
    found = {message.words for message in without_test()}
    new, produced = sorted(found - set(NOT_RECOGNIZED)), sorted(set(NOT_RECOGNIZED) - found)
    assert new == [], "write a test that looks for three words in a row that no other message has"
    assert produced == [], "take them out of NOT_RECOGNIZED"
    assert len(NOT_RECOGNIZED) <= MOST_NOT_RECOGNIZED


CODE = """
REMEDY = "Set it to another one."

class OwnError(ValueError):
    def __init__(self, found, name):
        super().__init__(f"{name} was found to be {found}.")

def check(value, others):
    if others:
        raise ValueError(f"{value!r} is refused. {REMEDY}")
    text = "either this text is used" if value else "or that text is used"
    raise OwnError(text, value)

def tell(error):
    logger.warning(f"Something is odd: {error}.")
    logger.info("Nothing is odd.")

def relay(error):
    raise ValueError(str(error))
"""


def test_messages_are_read_from_code() -> None:
    found = messages_in({"room/file.py": CODE})
    assert [(message.words, message.place, message.is_warning) for message in found.messages] == [
        ("... is refused. Set it to another one.", "room/file.py:check", False),
        ("... was found to be either this text is used.", "room/file.py:check", False),
        ("... was found to be or that text is used.", "room/file.py:check", False),
        ("Something is odd: ...", "room/file.py:tell", True),
    ]
    assert found.unknown == ["room/file.py:relay: ValueError(str(error))"]


def test_the_longest_part_of_a_place_decides_on_its_section() -> None:
    heads = sections(
        "<!-- messages: room/ -->\n<!-- end -->\n<!-- messages: room/file.py:check other/ -->\n<!-- end -->\n"
    )
    assert section_of("room/file.py:tell", heads) == "room/"
    assert section_of("room/file.py:check", heads) == "room/file.py:check other/"
    assert section_of("elsewhere/file.py:check", heads) is None


def test_what_is_written_about_a_message_stays_when_its_words_change() -> None:
    message = next(each for each in messages_of_the_package().messages if each.place.startswith("cli.py"))
    old = message.words.replace("expected", "we expected")
    note = "    Do this.\n\n    And that."
    page = f"<!-- messages: cli.py -->\n- `{old}`\n\n{note}\n\n- `It has gone.`\n<!-- end -->\n"
    assert notes(page) == {old: note, "It has gone.": ""}
    again = notes(written(page))
    assert again[message.words] == notes(page)[old]
    assert "It has gone." not in again
