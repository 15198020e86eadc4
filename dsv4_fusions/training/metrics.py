"""metrics.csv: a row a step, written as soon as the step is done."""

import contextlib
import csv
import os
from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = ("run", "step", "loss", "indexer_loss", "held_out_loss", "tokens_per_second", "seconds")


def read(path: str | os.PathLike) -> list[dict[str, str]]:
    """Rows of a metrics file, none where there is no file; a last line that was not finished is left out.

    Args:
      path: the file.

    Returns:
      Column -> text, for every row.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not a metrics file.
    """
    try:
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            lines = list(file)
    except FileNotFoundError:
        return []
    if lines and not lines[-1].endswith("\n") and (len(lines) > 1 or ",".join(COLUMNS).startswith(lines[0])):
        lines.pop()  # not finished
    header, *rows = list(csv.reader(lines)) or [COLUMNS]
    if tuple(header) != COLUMNS or any(len(row) != len(COLUMNS) for row in rows):
        raise ValueError(f"metrics: got {path} with other columns, wanted {','.join(COLUMNS)}")
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def start(path: str | os.PathLike, rows: Sequence[Mapping[str, Any]] = ()) -> None:
    """Begins a metrics file, replacing one that is there.

    Args:
      path: the file.
      rows: what it starts with. If there are any, the file is replaced as a whole and never lacks one.

    Raises:
      OSError: the file cannot be written.
    """
    written = f"{path}.partial" if rows else path
    with _table(written, "w") as table:
        table.writeheader()
        table.writerows(rows)
    if rows:
        os.replace(written, path)


def append(path: str | os.PathLike, row: Mapping[str, Any]) -> None:
    """Adds a row, on disk on return as far as other processes can tell.

    Args:
      path: a file that `start` began.
      row: a value for each of `COLUMNS`; None is left empty.

    Raises:
      OSError: the file cannot be written.
    """
    with _table(path, "a") as table:
        table.writerow(row)


@contextlib.contextmanager
def _table(path, mode):
    try:
        with open(path, mode, newline="", encoding="utf-8") as file:
            yield csv.DictWriter(file, COLUMNS, lineterminator="\n")
    except OSError as error:
        error.filename = os.fspath(path)  # a full disk is found on writing, where no name is known
        raise
