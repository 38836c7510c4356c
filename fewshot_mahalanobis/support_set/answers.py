"""Tables of answers: the answers of ``predict``, and which of them a person has turned into labels.

The columns are written by ``apps/answer_files.py``. A row is the dict of its cells by column.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

#: Columns of a table of answers, after path and label: for the user's mark, empty; the label as predicted; the
#: probability of it, or where it is no class of the most probable one; a mark, if asked for, where it is in doubt.
ANSWER_COLUMNS = ("checked", "predicted", "probability", "doubtful")
#: Columns by a classifier that rejects: the class that the probability is of; the outlier score and its threshold,
#: above which an image is of no class; and the doubt, from 0 to 1, at the nearest boundary of classes or of rejection.
GRADE_COLUMNS = ("class", "outlier_score", "outlier_threshold", "doubt")
#: Columns of either by which a table is read.
READ_COLUMNS = (*ANSWER_COLUMNS, *GRADE_COLUMNS[1:3], "error")


class LabelledRows(NamedTuple):
    """Rows of a table that give a picture its label.

    Parameters
    ----------
    rows : list of (int, dict)
        Line and cells of each.
    note : str
        Sentences about the other rows; empty if there are none.
    rejected_labels : frozenset of str
        The labels by which ``predict`` has called pictures that it rejected.
    """

    rows: list[tuple[int, dict[str, str]]]
    note: str = ""
    rejected_labels: frozenset[str] = frozenset()


def labels_of_answers(
    file: object, found: Sequence[tuple[int, dict[str, str]]], columns: Collection[str], rows: str = "all"
) -> LabelledRows:
    """Rows of a table that give an image its label.

    Every row does in a table without the columns "predicted" and "checked". With one of them it is a table of answers
    that ``predict`` wrote, and an answer is no label before somebody has checked it: its label was changed, so that it
    is no longer what was predicted, or the column "checked" says yes. What says neither yes nor no is not taken, and
    the note names it. ``rows="sure"`` takes other answers too, without those that are marked in the column "doubtful";
    "all" takes these too, but not those of pictures that could not be read.

    Parameters
    ----------
    file : object
        What messages call the table.
    found : sequence of (int, dict)
        Line and cells of each row.
    columns : collection of str
        Those of ``READ_COLUMNS`` that the table has.
    rows : {"all", "checked", "sure"}

    Raises
    ------
    ValueError
        No row is left, or ``rows`` is "sure" and the table has no column "doubtful".
    """
    found = [*found]
    rejected = _rejected_labels(cells for _, cells in found)
    if not {"predicted", "checked"} & {*columns}:
        return LabelledRows(found, "", rejected)
    if rows == "all":
        readable = [(line, cells) for line, cells in found if cells["label"] or not cells.get("error")]
        unread = len(found) - len(readable)
        note = f"Left out: {unread} row{'s' * (unread > 1)} of pictures that cannot be read." if unread else ""
        return LabelledRows(readable, note, rejected)
    if rows == "sure" and "doubtful" not in columns:
        raise ValueError(f"{file} does not say which answers are doubtful: `predict --min-probability` marks them")
    cleared = {line for line, cells in found if not cells["label"]}
    changed = {line for line, cells in found if cells["label"] != cells.get("predicted", cells["label"])} - cleared
    marked = {line: _is_yes(cells.get("checked", "")) for line, cells in found}
    checked = {line for line, yes in marked.items() if yes} - changed - cleared
    sure = {line for line, cells in found if rows == "sure" and _is_yes(cells["doubtful"]) is False}
    sure -= changed | checked | cleared
    taken = [(line, cells) for line, cells in found if line in changed | checked | sure]
    left = [(line, cells) for line, cells in found if line not in changed | checked | sure | cleared]
    unclear = Counter(cells["checked"] for line, cells in left if marked[line] is None)
    named = ", ".join(repr(mark) for mark, _ in unclear.most_common(_MOST_MARKS)) + ", ..." * (
        len(unclear) > _MOST_MARKS
    )
    if not taken:
        unknown = f" ({named} in the column checked says neither yes nor no)" if unclear else ""
        raise ValueError(
            f"{file} has {_answers(len(found))} of `predict`, and nobody has checked any{unknown}: correct the labels "
            "that are wrong, mark those that are right with an x in the column checked, or take all (--rows all)"
        )
    counts = {"changed": changed, "checked": checked, "sure": sure}
    listed = ", ".join(f"{len(lines)} {name}" for name, lines in counts.items() if lines)
    note = f"{len(taken)} of {len(found)} row{'s' * (len(found) > 1)} taken ({listed})."
    left_out = {
        "that nobody has checked (--rows all takes them)": len(left) - unclear.total(),
        f"whose mark says neither yes nor no: {named} (write x for yes)": unclear.total(),
        "without a label": len(cleared),
    }
    others = [f"{_answers(number)} {what}" for what, number in left_out.items() if number]
    return LabelledRows(taken, f"{note} Left out: {', '.join(others)}." if others else note, rejected)


def composed(label: str) -> str:
    """Unicode's composed form (NFC): file systems and spreadsheets differ in how they write an accent."""
    return unicodedata.normalize("NFC", label)


def _answers(number: int) -> str:
    return "1 answer" if number == 1 else f"{number} answers"


def _rejected_labels(rows: Iterable[dict[str, str]]) -> frozenset[str]:
    """Labels that ``predict`` gave where it rejected a picture: its outlier score is above the threshold.

    Earlier versions gave it no probability.
    """
    given: dict[bool, set[str]] = {True: set(), False: set()}
    for cells in rows:
        if cells.get("predicted") and "probability" in cells:
            score, threshold = _number(cells.get("outlier_score")), _number(cells.get("outlier_threshold"))
            given[score > threshold or not cells["probability"]].add(composed(cells["predicted"]))
    return frozenset(given[True] - given[False])


def _number(cell: str | None) -> float:
    """The number in a cell; NaN, which is above nothing, if there is none."""
    try:
        return float((cell or "").replace(",", "."))
    except ValueError:
        return math.nan


# -------------------------------------------------------------------- marks

#: Most marks, which say neither yes nor no, that a message names.
_MOST_MARKS = 5


def _bare(cell: str) -> str:
    """A mark without case, accents, white space, and what nobody sees; "=FALSE()" is "false", "[x]" is "x"."""
    decomposed = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", cell).casefold())
    return "".join(c for c in decomposed if unicodedata.category(c) not in ("Mn", "Cf", "Zs", "Cc")).strip("=()[].'!")


#: What says yes, and what says no: check boxes as spreadsheets write them in their languages; the words; what people
#: type or draw. A word that means yes in one language and no in another is in neither.
_MARKS = """
true verdadero verdadeiro vero vrai cert adevărat       | false falso faux fals
wahr ja richtig                                         | falsch nein nicht
waar sand sann sant jah jā                              | onwaar nietwaar niet nee falsk falskt usann nei nej nē
tosi kyllä õige tõene patiess tiesa taip                | epätosi ei väär aplams netiesa klaidingas
prawda pravda istina resnično tak ano áno da            | fałsz nepravda neistina napačno nie ne
igaz igen doğru evet benar ya đúng có                   | hamis nem yanlış yanlis hayır hayir salah tidak sai không
истина істина вярно да так αληθησ αληθεσ ναι            | ложь хибність хиба невярно лъжа нет ні не ψευδησ ψευδεσ όχι
真 是 参 참 はい 예 네 אמת כן صحيح نعم จริง ใช่               | 假 偽 否 不 거짓 いいえ 아니요 아니오 שקר לא خطأ لا เท็จ ไม่
yes oui si sim y j o s v t on ok okay x done checked    | no non não n f nu off not none null nan na n/a unchecked
right correct ✓ ✔ √ ☑ ☒ ✅ 👍 ● ■ ◉                      | wrong incorrect - -- – — _ ☐ □ ▢ ⬜ ◻ 👎
"""  # noqa: RUF001
_YES, _NO = (
    frozenset(_bare(word) for line in _MARKS.strip().splitlines() for word in line.split("|")[side].split())
    for side in (0, 1)
)


def _is_yes(cell: str) -> bool | None:
    """Whether a mark says yes (True) or no (False, also if it is empty), in many languages; None if it is neither."""
    bare = _bare(cell)
    if not bare or bare in _NO or re.fullmatch(r"[-+]?0+([.,]0*)?%?", bare):
        return False
    return True if bare in _YES or re.fullmatch(r"[-+]?1([.,]0*)?", bare) else None
