"""Data sets are parsed as their formats say, split by time, and cut alike for all ranks."""

import gzip
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchrec_ext.command.errors import UserError
from torchrec_ext.train.data import Bags, Examples, RankSlices, split_by_time, stable_hash
from torchrec_ext.train.data.criteo import DENSE_ROWS, dense_bucket, load_criteo
from torchrec_ext.train.data.movielens import age_bucket, load_movielens
from torchrec_ext.train.data.synthetic import load_synthetic

MOVIELENS = {
    "ml-100k.user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    "7\t17\tM\twriter\t55106\n10\t25\tF\tartist\tv1X\n",
    "ml-100k.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    "1\tToy Story\t1995\tComedy Animation\n2\tOld\tV\t\n",
    "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    "10\t1\t4\t300\n7\t1\t3\t100\n7\t2\t5\t200\n10\t99\t1\t200\n",
}


def _movielens(folder: Path, **replaced: str) -> str:
    for name, text in MOVIELENS.items():
        (folder / name).write_text(replaced.get(name.split(".")[1], text))
    return str(folder)


def _bags(bags: Bags) -> list[list[int]]:
    values, lengths = bags.select(torch.arange(bags.offsets.numel() - 1))
    return [part.tolist() for part in values.split(lengths.tolist())]


def _numbered(count: int) -> Examples:
    """Examples whose only value is their number, every third bag empty."""
    lists = [[] if number % 3 == 2 else [number] * (1 + number % 2) for number in range(count)]
    numbers = torch.arange(count, dtype=torch.float32)
    return Examples({"number": Bags.from_lists(lists, count)}, numbers[:, None], numbers)


def test_movielens_is_ordered_by_time_and_its_columns_become_rows(tmp_path: Path) -> None:
    examples = load_movielens(_movielens(tmp_path))
    # By time; at the same second in the order of the file.
    assert examples.labels.tolist() == [0, 1, 0, 1]
    features = {name: _bags(bags) for name, bags in examples.features.items()}
    # Users are numbered by sorted text ("10" < "7"), row 0 is the unknown.
    assert features["user"] == [[2], [2], [1], [1]]
    assert features["item"] == [[1], [2], [0], [1]]
    assert features["age"] == [[1], [1], [2], [2]]
    assert features["gender"] == [[2], [2], [1], [1]]
    assert features["occupation"] == [[2], [2], [1], [1]]
    assert features["zip_prefix"] == [[1], [1], [2], [2]]
    # "V" is no year.
    assert features["release_year"] == [[1], [0], [0], [1]]
    # Animation 1, Comedy 2; in the order of the file.
    assert features["genres"] == [[2, 1], [], [], [2, 1]]
    assert features["user_x_genre"] == [[2 * 3 + 2, 2 * 3 + 1], [], [], [3 + 2, 3 + 1]]
    assert examples.rows() == {
        "user": 3,
        "item": 3,
        "age": 3,
        "gender": 3,
        "occupation": 3,
        "zip_prefix": 3,
        "release_year": 2,
        "genres": 3,
        "user_x_genre": 9,
    }
    assert examples.crossed == {"user_x_genre"}


def test_movielens_comes_with_the_recbole_wheel() -> None:
    examples = load_movielens(None)
    assert len(examples) == 100_000
    assert int(examples.labels.sum()) == 55_375
    assert examples.rows()["user"] == 943 + 1
    assert examples.rows()["item"] == 1682 + 1
    for name, bags in examples.features.items():
        low, high = bags.values.aminmax()
        assert low >= 0 and high < bags.rows, name


@pytest.mark.parametrize(
    ("replaced", "expected"),
    [
        ({"inter": "user_id:token\trating:float\n"}, "lacks the column 'item_id'"),
        ({"inter": MOVIELENS["ml-100k.inter"] + "1\t2\n"}, "ml-100k.inter:6: 2 fields, the head"),
        ({"inter": MOVIELENS["ml-100k.inter"].replace("300", "x")}, "inter:2: timestamp is not a"),
        ({"user": MOVIELENS["ml-100k.user"].partition("\n")[0]}, "holds a header and no rows"),
        ({"item": ""}, "lacks the column 'item_id'"),
    ],
)
def test_malformed_movielens_files_are_named(
    tmp_path: Path, replaced: dict[str, str], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        load_movielens(_movielens(tmp_path, **replaced))


def test_a_missing_movielens_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none/ml-100k.inter: No such file"):
        load_movielens(str(tmp_path / "none"))


def test_ages_fall_into_the_groups_of_movielens() -> None:
    ages = ["1", "17", "18", "24", "25", "34", "35", "44", "45", "49", "50", "55", "56", "99", "?"]
    expected = ["0", "0", "1", "1", "2", "2", "3", "3", "4", "4", "5", "5", "6", "6", ""]
    assert [age_bucket(age) for age in ages] == expected


def _criteo_line(label: str, counts: dict[int, str], tokens: dict[int, str]) -> str:
    dense = [counts.get(number, "") for number in range(1, 14)]
    categorical = [tokens.get(number, "") for number in range(1, 27)]
    return "\t".join([label, *dense, *categorical]) + "\n"


CRITEO = _criteo_line("1", {1: "0", 2: "-2", 13: "100"}, {1: "68fd1e64", 26: "ffff"})
CRITEO += _criteo_line("0", {1: "7"}, {2: "68fd1e64"})


@pytest.mark.parametrize("suffix", ["tsv", "tsv.gz"])
def test_criteo_columns_become_dense_values_buckets_and_hashed_rows(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"log.{suffix}"
    path.write_bytes(gzip.compress(CRITEO.encode()) if suffix.endswith("gz") else CRITEO.encode())
    examples = load_criteo(str(path), rows_per_feature=1000, max_examples=None)
    assert examples.labels.tolist() == [1, 0]
    assert examples.dense.shape == (2, 13)
    expected = torch.zeros(2, 13)
    expected[0, 12], expected[1, 0] = math.log(101), math.log(8)
    assert torch.equal(examples.dense, expected)
    assert list(examples.features) == [f"I{n}" for n in range(1, 14)] + [
        f"C{n}" for n in range(1, 27)
    ]
    assert _bags(examples.features["I1"]) == [[2], [2 + 4]]
    assert _bags(examples.features["I2"]) == [[1], [0]]
    assert _bags(examples.features["C1"]) == [
        [stable_hash("C1", "68fd1e64", 1000)],
        [stable_hash("C1", "", 1000)],
    ]
    assert _bags(examples.features["C26"])[0] == [stable_hash("C26", "ffff", 1000)]
    assert examples.rows() == {f"I{n}": DENSE_ROWS for n in range(1, 14)} | {
        f"C{n}": 1000 for n in range(1, 27)
    }


def test_criteo_stops_after_max_examples(tmp_path: Path) -> None:
    path = tmp_path / "log.tsv"
    path.write_text(CRITEO + "broken\n")
    assert len(load_criteo(str(path), 10, max_examples=2)) == 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("1\t2\n", ":3: 2 tab-separated fields, not 40"),
        (_criteo_line("2", {}, {}), ":3: the label is '2', not 0 or 1"),
        (_criteo_line("1", {4: "x"}, {}), ":3: I4 is 'x', not an integer"),
    ],
)
def test_malformed_criteo_lines_are_named(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "log.tsv"
    path.write_text(CRITEO + line)
    with pytest.raises(UserError, match=expected):
        load_criteo(str(path), 10, None)


def test_unreadable_criteo_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.tsv").touch()
    (tmp_path / "text.gz").write_text("not gzip")
    for name, expected in (
        ("none.tsv", "No such file"),
        ("empty.tsv", "holds no examples"),
        ("text.gz", "cannot read"),
    ):
        with pytest.raises(UserError, match=f"{name}.*{expected}|{expected}.*{name}"):
            load_criteo(str(tmp_path / name), 10, None)


def test_every_count_has_a_bucket() -> None:
    assert [dense_bucket(count) for count in (None, -3, 0, 1, 2, 7)] == [0, 1, 2, 2, 3, 6]
    assert 2 < dense_bucket(2**31 - 1) < DENSE_ROWS
    assert dense_bucket(10**30) == DENSE_ROWS - 1


def test_hashing_is_the_same_in_every_process() -> None:
    program = (
        "from torchrec_ext.train.data import stable_hash;"
        "print([stable_hash('C1', str(token), 1 << 20) for token in range(100)])"
    )
    here = [stable_hash("C1", str(token), 1 << 20) for token in range(100)]
    there = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        check=True,
        text=True,
    )
    assert there.stdout.strip().endswith(str(here))
    # A value from the definition: CRC-32 of "C1\t68fd1e64".
    assert stable_hash("C1", "68fd1e64", 2**32) == 0xCBADEE95
    assert stable_hash("C2", "68fd1e64", 2**32) != stable_hash("C1", "68fd1e64", 2**32)


def _synthetic(**changed: float) -> Examples:
    given = {"examples": 4000, "features": 3, "rows": 50, "bag": 3, "zipf": 1.0}
    return load_synthetic(**{**given, "informative": 0.5, "seed": 0, **changed})  # type: ignore[arg-type]


def test_synthetic_data_depends_on_the_seed_alone() -> None:
    first, second, other = _synthetic(), _synthetic(), _synthetic(seed=1)
    assert torch.equal(first.labels, second.labels)
    assert torch.equal(first.features["f2"].values, second.features["f2"].values)
    assert not torch.equal(first.features["f2"].values, other.features["f2"].values)


def test_synthetic_rows_follow_zipf_and_bags_have_one_to_bag_rows() -> None:
    bags = _synthetic().features["f0"]
    lengths = bags.offsets.diff()
    assert lengths.unique().tolist() == [1, 2, 3]
    counts = torch.bincount(bags.values, minlength=50).double()
    assert counts.numel() == 50
    expected = 1 / torch.arange(1, 51, dtype=torch.float64)
    expected *= counts.sum() / expected.sum()
    # Pearson's chi-squared with 49 degrees of freedom: 0.1 % quantile at 85.4.
    assert float(((counts - expected) ** 2 / expected).sum()) < 85.4


def test_synthetic_labels_are_coins_without_informative_rows() -> None:
    assert abs(float(_synthetic(informative=0).labels.mean()) - 0.5) < 0.03


def test_split_holds_out_the_latest_examples() -> None:
    examples = _numbered(100)
    split = split_by_time(examples, 0.2, "test")
    assert split.train.labels.tolist() == list(range(80))
    assert split.held_out.labels.tolist() == list(range(80, 100))
    assert _bags(split.held_out.features["number"])[:3] == [[], [81, 81], [82]]
    assert torch.equal(split.held_out.dense, examples.dense[80:])


def test_validation_leaves_the_test_part_alone() -> None:
    split = split_by_time(_numbered(100), 0.2, "validation")
    assert split.train.labels.tolist() == list(range(64))
    assert split.held_out.labels.tolist() == list(range(64, 80))


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_a_split_with_an_empty_part_is_refused(fraction: float) -> None:
    with pytest.raises(UserError, match="data.test_fraction"):
        split_by_time(_numbered(100), fraction, "test")


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_together_see_the_global_batches_of_one_rank(shuffle: bool) -> None:
    examples = _numbered(50)
    whole = list(RankSlices(12, 0, 1).training(examples, 3, shuffle))
    parts = [list(RankSlices(12, rank, 3).training(examples, 3, shuffle)) for rank in range(3)]
    assert len(whole) == 4
    for step, batch in enumerate(whole):
        slices = [part[step] for part in parts]
        assert torch.cat([part.labels for part in slices]).equal(batch.labels)
        assert torch.cat([part.dense for part in slices]).equal(batch.dense)
        lengths = torch.cat([part.sparse["number"].lengths() for part in slices])
        assert lengths.equal(batch.sparse["number"].lengths())
        values = torch.cat([part.sparse["number"].values() for part in slices])
        assert values.equal(batch.sparse["number"].values())
    seen = torch.cat([batch.labels for batch in whole])
    assert seen.unique().numel() == 48
    assert seen.equal(torch.arange(48.0)) is not shuffle


def test_shuffling_depends_on_the_seed() -> None:
    first, same, other = (
        torch.cat([b.labels for b in RankSlices(5, 0, 1).training(_numbered(50), seed, True)])
        for seed in (1, 1, 2)
    )
    assert first.equal(same)
    assert not first.equal(other)


@pytest.mark.parametrize("count", [1, 5, 8, 11, 16])
def test_evaluation_scores_every_example_once_in_batches_of_equal_size(count: int) -> None:
    examples = _numbered(count)
    parts = [list(RankSlices(8, rank, 2).evaluation(examples)) for rank in range(2)]
    assert len(parts[0]) == len(parts[1])
    assert all(batch.labels.numel() == 4 for part in parts for batch in part)
    scored = [batch.labels[: batch.count] for part in parts for batch in part]
    assert torch.cat(scored).sort().values.equal(examples.labels)


def test_bags_are_gathered_in_any_order() -> None:
    bags = Bags.from_lists([[1, 2], [], [3], [4, 5, 6]], 7)
    values, lengths = bags.select(torch.tensor([3, 1, 0, 3]))
    assert values.tolist() == [4, 5, 6, 1, 2, 4, 5, 6]
    assert lengths.tolist() == [3, 0, 2, 3]
