"""MovieLens-100k in RecBole's atomic files (``ml-100k.inter``, ``.user``, ``.item``).

Harper and Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015. The files
are looked up in the installed ``recbole`` wheel without importing it, or in a folder.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import torch

from torchrec_ext.command.errors import UserError
from torchrec_ext.train.data.examples import Bags, Examples

# Lower ends of the age groups of the MovieLens-1M release.
AGE_BUCKETS = (18, 25, 35, 45, 50, 56)
POSITIVE_RATING = 4.0

Table = dict[str, list[str]]


def load_movielens(path: str | None) -> Examples:
    """Read the ratings, oldest first.

    The label is 1 for a rating of at least 4. Features: user, item, age group, gender, occupation,
    zip prefix (first character), release year, genres (a bag) and user x genre (a bag).
    Row 0 of each table stands for a missing or unknown token.

    Args:
        path: Folder with the three files; None for the copy in the installed recbole wheel.

    Raises:
        UserError: If a file is missing or malformed.
    """
    folder = Path(path) if path is not None else _wheel_folder()
    ratings = read_atomic_file(
        folder / "ml-100k.inter", ["user_id", "item_id", "rating", "timestamp"]
    )
    users = read_atomic_file(
        folder / "ml-100k.user", ["user_id", "age", "gender", "occupation", "zip_code"]
    )
    items = read_atomic_file(folder / "ml-100k.item", ["item_id", "release_year", "class"])

    timestamps = torch.tensor(_numbers(folder / "ml-100k.inter", "timestamp", ratings))
    stars = torch.tensor(_numbers(folder / "ml-100k.inter", "rating", ratings))
    # Stable, so that ratings of one second keep the order of the file on every machine.
    order = torch.argsort(timestamps, stable=True)

    user_rows, user_vocabulary = encode(users["user_id"])
    item_rows, item_vocabulary = encode(items["item_id"])
    user = _lookup(ratings["user_id"], user_vocabulary)[order]
    item = _lookup(ratings["item_id"], item_vocabulary)[order]

    def by_user(tokens: list[str]) -> Bags:
        return _side_feature(tokens, user_rows, len(user_vocabulary) + 1, user)

    def by_item(tokens: list[str]) -> Bags:
        return _side_feature(tokens, item_rows, len(item_vocabulary) + 1, item)

    genres, crosses = _genres(items, item_rows, user, item, len(user_vocabulary) + 1)
    features = {
        "user": Bags.single(user, len(user_vocabulary) + 1),
        "item": Bags.single(item, len(item_vocabulary) + 1),
        "age": by_user([age_bucket(age) for age in users["age"]]),
        "gender": by_user(users["gender"]),
        "occupation": by_user(users["occupation"]),
        "zip_prefix": by_user([code[:1].upper() for code in users["zip_code"]]),
        "release_year": by_item([year if year.isdigit() else "" for year in items["release_year"]]),
        "genres": genres,
        "user_x_genre": crosses,
    }
    labels = (stars >= POSITIVE_RATING).float()[order]
    return Examples(
        features, torch.empty(len(labels), 0), labels, crossed=frozenset({"user_x_genre"})
    )


def read_atomic_file(path: Path, wanted: Iterable[str]) -> Table:
    """Read columns of a tab-separated file whose header gives ``name:type`` per column.

    Args:
        path: The file.
        wanted: Column names without their types.

    Returns:
        The text of each wanted column, in the order of the file.

    Raises:
        UserError: If the file is missing, lacks a column, or a line has another number of fields.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; set data.path to the folder of the "
            "ml-100k files or install recbole==1.2.1 without its dependencies"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}") from error
    names = [field.partition(":")[0] for field in lines[0].split("\t")] if lines else []
    missing = [name for name in wanted if name not in names]
    if missing:
        raise UserError(f"{path}: the header lacks the column {missing[0]!r}, it has {names}")
    rows = [line.split("\t") for line in lines[1:] if line]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise UserError(f"{path}:{number}: {len(row)} fields, the header has {len(names)}")
    if not rows:
        raise UserError(f"{path} holds a header and no rows")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    return {name: list(columns[name]) for name in wanted}


def encode(tokens: list[str]) -> tuple[torch.Tensor, dict[str, int]]:
    """Number the distinct tokens from 1 in sorted order; the empty token is row 0.

    Returns:
        ``(rows, vocabulary)``: ``[tokens]`` int64 and the row of each non-empty token.
    """
    distinct = sorted({token for token in tokens if token})
    vocabulary = {token: row for row, token in enumerate(distinct, start=1)}
    return _lookup(tokens, vocabulary), vocabulary


def age_bucket(age: str) -> str:
    """Name the age group of a text such as ``"24"``; text that is no number gives ``""``."""
    if not age.isdigit():
        return ""
    return str(sum(int(age) >= start for start in AGE_BUCKETS))


def _wheel_folder() -> Path:
    spec = importlib.util.find_spec("recbole")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "movielens-100k is read from the recbole wheel, which is not installed: run "
            "pip install --no-deps recbole==1.2.1 or set data.path to the folder of the files"
        )
    return Path(spec.submodule_search_locations[0]) / "dataset_example" / "ml-100k"


def _numbers(path: Path, name: str, table: Table) -> list[float]:
    numbers = []
    for line, text in enumerate(table[name], start=2):
        try:
            numbers.append(float(text))
        except ValueError as error:
            raise UserError(f"{path}:{line}: {name} is not a number: {text!r}") from error
    return numbers


def _lookup(tokens: list[str], vocabulary: dict[str, int]) -> torch.Tensor:
    return torch.tensor([vocabulary.get(token, 0) for token in tokens], dtype=torch.int64)


def _side_feature(
    tokens: list[str], owner_rows: torch.Tensor, owners: int, owner: torch.Tensor
) -> Bags:
    """Spread a column of the user or item file over the ratings."""
    rows, vocabulary = encode(tokens)
    by_owner = torch.zeros(owners, dtype=torch.int64)
    by_owner[owner_rows] = rows
    return Bags.single(by_owner[owner], len(vocabulary) + 1)


def _genres(
    items: Table, item_rows: torch.Tensor, user: torch.Tensor, item: torch.Tensor, users: int
) -> tuple[Bags, Bags]:
    """Build the genres of each rating's item, and each of them crossed with the user."""
    names = sorted({genre for text in items["class"] for genre in text.split()})
    row_of = {genre: row for row, genre in enumerate(names, start=1)}
    width = len(names) + 1
    by_item: dict[int, list[int]] = {
        row: [row_of[genre] for genre in text.split()]
        for row, text in zip(item_rows.tolist(), items["class"], strict=True)
    }
    bags = [by_item.get(row, []) for row in item.tolist()]
    crosses = [
        [owner * width + genre for genre in bag]
        for owner, bag in zip(user.tolist(), bags, strict=True)
    ]
    return Bags.from_lists(bags, width), Bags.from_lists(crosses, users * width)
