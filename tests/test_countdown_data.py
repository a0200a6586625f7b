import builtins
import itertools
import json
import random
from fractions import Fraction

import numpy as np
import pytest

from jaxrl_llm.countdown_data import (
    Problems,
    generate,
    is_solvable,
    read_problems,
    split,
)
from jaxrl_llm.envs import host
from jaxrl_llm.envs.countdown import HELD_OUT
from jaxrl_llm.types import ConfigError

ROWS = [(65, [19, 36, 55, 7]), (33, [3, 12, 7]), (24, [8, 3, 8, 3]), (24, [1, 1, 1, 1])]


def problems_of(rows):
    k = max(len(nums) for _, nums in rows)
    numbers = np.array([nums + [0] * (k - len(nums)) for _, nums in rows])
    return Problems(numbers, np.array([target for target, _ in rows]))


def rows_of(problems):
    return [
        (int(target), numbers[numbers > 0].tolist())
        for numbers, target in zip(problems.numbers, problems.targets, strict=True)
    ]


def keys_of(problems):
    return {(target, *sorted(nums)) for target, nums in rows_of(problems)}


def write_jsonl(path, rows=ROWS, **others):
    lines = [json.dumps({"target": target, "nums": nums} | others) for target, nums in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def write_parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow.parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def columns_of(rows):
    return {"target": [t for t, _ in rows], "nums": [nums for _, nums in rows]}


def test_jsonl_is_read_in_order_with_its_repeated_and_unsolvable_rows(tmp_path):
    rows = [*ROWS, ROWS[0]]
    problems = read_problems(write_jsonl(tmp_path / "a.jsonl", rows, note="ignored"))
    assert rows_of(problems) == rows and len(problems) == 5
    assert problems.numbers.shape == (5, 4) and problems.numbers[1].tolist() == [3, 12, 7, 0]
    assert problems.n_numbers.tolist() == [4, 3, 4, 4, 4]
    assert is_solvable(problems).tolist() == [True, True, True, False, True]


def test_parquet_is_read_as_jsonl_is(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", columns_of(ROWS) | {"note": list("abcd")})
    assert rows_of(read_problems(str(path))) == ROWS


def test_a_folder_is_read_file_after_file_whatever_their_widths(tmp_path):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "a.jsonl", ROWS[1:2])
    write_jsonl(tmp_path / "data" / "b.jsonl", ROWS[2:])
    (tmp_path / "README.md").write_text("not data")
    assert rows_of(read_problems(tmp_path)) == ROWS[1:]


def test_a_name_is_read_from_the_hub_and_only_its_parquet_files(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "train.parquet", columns_of(ROWS))
    asked = []

    def snapshot_download(name, **settings):
        asked.append((name, settings))
        return str(path.parent)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert rows_of(read_problems("Jiayi-Pan/Countdown-Tasks-3to4")) == ROWS
    settings = dict(repo_type="dataset", allow_patterns="*.parquet")
    assert asked == [("Jiayi-Pan/Countdown-Tasks-3to4", settings)]


def test_without_a_network_a_name_is_refused_in_one_line(monkeypatch):
    def snapshot_download(name, **settings):
        raise ConnectionError("no route to host\nmany\nlines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match="nobody/nothing: neither .*no route.*network") as caught:
        read_problems("nobody/nothing")
    assert "\n" not in str(caught.value)


GOOD = '{"target": 33, "nums": [3, 12, 7]}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.jsonl has no rows"),
        (GOOD + "{oops\n", "a.jsonl, row 2: not JSON"),
        (GOOD + "\n", "row 2: not JSON"),
        (GOOD + "[33, [3]]\n", "row 2: expected an object"),
        (GOOD + '{"target": 33}\n', "row 2: no column nums among .'target'."),
        ('{"goal": 33}\n', "row 1: no column target and no column nums"),
        (GOOD + '{"target": 33.0, "nums": [3]}\n', "row 2: target=33.0"),
        (GOOD + '{"target": "33", "nums": [3]}\n', "row 2: target='33'"),
        (GOOD + '{"target": true, "nums": [1]}\n', "row 2: target=True"),
        (GOOD + '{"target": null, "nums": [1]}\n', "row 2: target=None"),
        (GOOD + '{"target": 33, "nums": "3, 12"}\n', "row 2: .*nums='3, 12'"),
        (GOOD + '{"target": 33, "nums": [3, 1.5]}\n', r"row 2: .*nums=\[3, 1.5\]"),
        (GOOD + '{"target": 33, "nums": []}\n', r"row 2: .*nums=\[\]"),
        (GOOD + '{"target": 33, "nums": [3, 0, 7]}\n', r"row 2: .*nums=\[3, 0, 7\]"),
        (GOOD + '{"target": 33, "nums": [1, 2, 3, 4, 5, 6, 7]}\n', "row 2: .* 1 to 6 positive"),
        (GOOD + '{"target": 33, "nums": [-3, 7]}\n', "a.jsonl, row 2: target 33, numbers .-3"),
        (GOOD + '{"target": 0, "nums": [3, 7]}\n', "row 2: target 0"),
        (GOOD + '{"target": 1000001, "nums": [3]}\n', "row 2: target 1000001"),
        (GOOD + '{"target": 5, "nums": [1000, 3]}\n', "row 2: .* numbers of 1 to 999"),
        (GOOD + '{"target": 5, "nums": [999, 999, 999, 999, 999, 999]}\n', "row 2: .* below 10"),
        (GOOD + '{"target": 99999999999999999999, "nums": [3]}\n', "row 2: target=9999"),
    ],
)
def test_a_bad_file_is_refused_by_path_and_row_in_one_line(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_problems(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"target": [33]}, "no column nums among .'target'."),
        ({"target": [33, None], "nums": [[3], [4]]}, "row 2: target=None"),
        ({"target": [33, 34], "nums": [[3], None]}, "row 2: .*nums=None"),
        ({"target": [33.0], "nums": [[3]]}, "row 1: target=33.0"),
        ({"target": [33], "nums": ["3, 12"]}, "row 1: .*nums='3, 12'"),
    ],
)
def test_a_bad_parquet_file_is_refused_by_path_and_row(tmp_path, columns, message):
    path = write_parquet(tmp_path / "a.parquet", columns)
    with pytest.raises(ConfigError, match=message) as caught:
        read_problems(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_file_of_the_kind_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("target,nums\n")
    (tmp_path / "empty").mkdir()
    for source, message in (
        (tmp_path / "a.csv", "expected a file that ends with .parquet or .jsonl"),
        (tmp_path / "empty", "expected files that end with"),
        (tmp_path / "missing.jsonl", "no such file or folder"),
        ("data/missing.parquet", "no such file or folder"),
        ("missing", "or the name of a data set on the hub"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_problems(source)


def test_a_damaged_parquet_file_is_refused(tmp_path):
    good = write_parquet(tmp_path / "good.parquet", columns_of(ROWS)).read_bytes()
    for damaged in (b"", b"PAR1", b"hello" * 100, good[:-20], good[: len(good) // 2]):
        path = tmp_path / "a.parquet"
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="a.parquet: not a parquet file") as caught:
            read_problems(path)
        assert "\n" not in str(caught.value)


def test_without_pyarrow_a_parquet_file_is_refused_with_what_to_type(tmp_path, monkeypatch):
    real = builtins.__import__

    def importing(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(ConfigError, match="pip install"):
        read_problems(tmp_path / "a.parquet")


def repeated(n, seed):
    """Rows of which many share a key, in other orders of the numbers."""
    rng = random.Random(seed)
    few = [(rng.randint(1, 5), [rng.randint(1, 4) for _ in range(rng.choice((2, 3)))])]
    while len(few) < n:
        target, nums = rng.choice(few)
        is_new = rng.random() < 0.4
        few.append(
            (rng.randint(1, 9), [rng.randint(1, 9) for _ in range(rng.choice((2, 3)))])
            if is_new
            else (target, rng.sample(nums, len(nums)))
        )
    return few


@pytest.mark.parametrize("seed", range(5))
def test_the_two_sides_of_a_split_share_no_key_and_lose_none(seed):
    rows = repeated(300, seed)
    problems = problems_of(rows)
    train, held_out = split(problems, 20, seed)
    assert not keys_of(train) & keys_of(held_out)
    assert keys_of(train) | keys_of(held_out) == keys_of(problems)
    assert len(held_out) == len(keys_of(held_out)) == 20
    kept = [row for row in rows if (row[0], *sorted(row[1])) not in keys_of(held_out)]
    assert rows_of(train) == kept and len(kept) > len(keys_of(train))
    assert all(row in rows for row in rows_of(held_out))


def test_a_split_depends_on_the_seed_and_not_on_the_order_of_rows():
    rows = repeated(300, 0)
    first = keys_of(split(problems_of(rows), 20, 0)[1])
    assert keys_of(split(problems_of(rows[::-1]), 20, 0)[1]) == first
    assert keys_of(split(problems_of(rows), 20, 1)[1]) != first


def test_a_split_that_leaves_nothing_is_refused():
    problems = problems_of([*ROWS, (65, [7, 55, 36, 19])])
    assert len(split(problems, 3, 0)[0]) in (1, 2)
    for held_out in (0, 4, 5, -1):
        with pytest.raises(ConfigError, match="expected 1 to 3, as there are 4 problems"):
            split(problems, held_out, 0)


def test_generated_problems_are_solvable_repeatable_and_as_asked():
    problems = generate(200, 1)
    assert len(problems) == 200 and set(problems.n_numbers) == {3, 4}
    assert problems.targets.min() >= 10 and problems.targets.max() <= 100
    assert all(host.solve(nums, target) for target, nums in rows_of(problems))
    assert rows_of(generate(200, 1)) == rows_of(problems) != rows_of(generate(200, 2))
    small = generate(50, 0, "small", max_target=30, split=HELD_OUT)
    assert small.targets.max() <= 30 and small.numbers.shape == (50, 3)
    assert all(host.split_of(nums, target, 8) == 1 for target, nums in rows_of(small))
    for bad in (dict(n=0), dict(n=1, preset="huge"), dict(n=1, max_number=500)):
        with pytest.raises(ConfigError):
            generate(**({"seed": 0} | bad))


def every_value(numbers):
    """All that some numbers make, over the rationals, by plain recursion."""
    if len(numbers) == 1:
        return set(numbers)
    found = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
        for result in [a + b, a - b, a * b] + ([a / b] if b else []):
            found |= every_value((*rest, result))
    return found


def test_solvable_means_solvable_over_the_rationals():
    rng = random.Random(0)
    rows = [(24, [3, 3, 8, 8]), (24, [1, 5, 5, 5])]  # only through fractions
    rows += [(998_000, [999, 999, 1, 1]), (999_123, [999, 999, 1, 1])]  # 998·1000, and not
    rows += [(500, [1, 1, 1, 1, 1]), (15, [1, 2, 3, 4, 5]), (8, [8]), (9, [8])]
    for _ in range(60):
        rows.append((rng.randint(1, 60), [rng.randint(1, 12) for _ in range(rng.choice((2, 3)))]))
    rows += [(rng.randint(20, 90), [rng.randint(1, 9) for _ in range(4)]) for _ in range(4)]
    expected = [
        target in every_value(tuple(map(Fraction, nums))) if len(nums) < 5 else target == 15
        for target, nums in rows
    ]
    assert is_solvable(problems_of(rows)).tolist() == expected
    assert 0.1 < np.mean(expected) < 0.9 and expected[:4] == [True, True, True, False]


def test_problems_are_added_and_taken_row_by_row():
    both = problems_of(ROWS[1:2]) + problems_of(ROWS[2:])
    assert rows_of(both) == ROWS[1:]
    assert rows_of(both.take(np.array([2, 0]))) == [ROWS[3], ROWS[1]]
    assert rows_of(both.take(both.targets == 24)) == ROWS[2:]


@pytest.mark.parametrize(
    ("numbers", "targets", "message"),
    [
        ([[3, 0, 7]], [5], r"row 1: target 5, numbers \[3, 0, 7\]"),
        ([[3, 7], [0, 0]], [5, 5], "row 2"),
        ([[3, 7]], [5, 5], "expected at least one problem"),
        (np.zeros((0, 3), int), [], "expected at least one problem"),
        ([[1] * 7], [5], "K from 1 to 6"),
    ],
)
def test_arrays_that_are_no_problems_are_refused(numbers, targets, message):
    with pytest.raises(ConfigError, match=message):
        Problems(np.array(numbers), np.array(targets, int))
