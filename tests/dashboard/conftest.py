import json

import pytest


@pytest.fixture(scope="session")
def write_run():
    """Write the files of a run: `write_run(folder, {"reward/mean": [0.1, 0.2]}, seed=1, gamma=1)`.

    Metrics are columns, whose rows are steps 1, 2, … (None: not logged), or a list of rows. Its
    config has 4 prompts × 2 completions, the seed, and further keywords as settings of the
    algorithm; `config` replaces all of it, None leaves the file out.
    """

    def write(folder, metrics=(), *, seed=0, samples=(), summary=None, timing=(), **settings):
        config = {
            "train": {"prompts": 4, "group_size": 2},
            "algorithm": settings,
            "run": {"seed": seed, "name": folder.name},
        }
        config = settings.get("config", config)
        rows = rows_of(metrics) if isinstance(metrics, dict) else metrics
        folder.mkdir(parents=True, exist_ok=True)
        for name, lines in (("metrics", rows), ("samples", samples), ("timing", timing)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / f"{name}.jsonl").write_text(text)
        for name, value in (("config", config), ("summary", summary)):
            if value is not None:
                (folder / f"{name}.json").write_text(json.dumps(value))
        return folder

    return write


def rows_of(columns):
    rows = [{"step": i + 1} for i in range(max(map(len, columns.values())))]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=False):
            if value is not None:
                row[name] = value
    return rows
