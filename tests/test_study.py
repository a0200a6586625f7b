import dataclasses
import importlib
import json
import re
import sys

import numpy as np
import pytest

from experiments import (
    ablate_dynamic_sampling,
    ablate_group_size,
    ablate_kl_coef,
    ablate_learning_rate,
    cli,
    publish,
    results,
    study,
    verify_results,
)
from experiments.study import ArmResult, StudyConfig, figures, programs
from jaxrl_llm.logging import config_hash, write_json
from jaxrl_llm.suites import SuiteResult, stages_record
from jaxrl_llm.trainer import RunConfig
from jaxrl_llm.types import ConfigError


def invoke(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    monkeypatch.setattr(cli, "use_compilation_cache", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        cli.run(module.Config, module.main, module.__doc__)
    return stopped.value.code


def arm(values, **others):
    """An arm whose seeds came to these sampled accuracies."""
    values = np.array(values, float)
    rest = {name: np.array(x, float) for name, x in others.items()}
    return ArmResult(study.BASE, {"sampled": values} | rest, {})


NEAR, FAR = np.array([0.40, 0.41, 0.42, 0.43, 0.44]), 0.1


def test_the_runs_of_a_program_differ_in_scalars_alone():
    config = ablate_kl_coef.Config().resolved()
    arms = ablate_kl_coef.arms(config)
    assert programs(arms, 2, 100) == [[(name, seed) for name in arms for seed in (0, 1)]]
    assert programs(arms, 5, 5) == [[(name, seed) for seed in range(5)] for name in arms]
    groups = ablate_group_size.arms(ablate_group_size.Config().resolved())
    assert [len(part) for part in programs(groups, 4, 100)] == [4] * 3


def test_arms_of_the_group_size_sample_equally_many_completions():
    config = ablate_group_size.Config().resolved()
    sizes = {a.train.prompts * a.train.group_size for a in ablate_group_size.arms(config).values()}
    assert sizes == {256}
    with pytest.raises(ConfigError, match="groups: 3 completions of each problem"):
        ablate_group_size.arms(dataclasses.replace(config, groups=(3,)))


@pytest.mark.parametrize(
    ("by_coef", "said"),
    [
        ((NEAR, NEAR + FAR, NEAR), "supported"),
        ((NEAR + FAR, NEAR, NEAR + FAR), "supported"),
        ((NEAR, NEAR + FAR, NEAR + 2 * FAR), "contradicted"),
        ((NEAR, NEAR + FAR, NEAR[::-1] + FAR), "not resolved"),
    ],
)
def test_not_monotonic_means_up_and_down(by_coef, said):
    arms = {f"β = {i}": arm(values) for i, values in enumerate(by_coef)}
    (finding,) = ablate_kl_coef.findings(arms)
    assert finding.verdict == said and len(finding.effects) == 2


def test_differences_are_paired_by_seed_and_in_points():
    arms = {"a": arm(NEAR), "b": arm(NEAR + np.array([0.01, 0.02, 0.01, 0.02, 0.01]))}
    effect = study.difference(arms, "b", "a")
    assert effect.value == pytest.approx(1.4)
    assert 1.0 <= effect.low < effect.high <= 2.0


def test_findings_name_what_they_compare():
    steady = {"unsteadiness": [0.01, 0.011, 0.01, 0.012, 0.01]}
    shaky = {"unsteadiness": [0.05, 0.051, 0.052, 0.05, 0.049]}
    arms = {"1e-4": arm(NEAR - FAR, **steady), "8e-4": arm(NEAR, **steady), "1": arm(NEAR, **shaky)}
    slow, fast, less_steady = ablate_learning_rate.findings(arms)
    assert (slow.verdict, fast.verdict) == ("supported", "not resolved")
    assert less_steady.verdict == "supported"
    assert str(slow).startswith(
        "F8, a rate of 1e-4 learns less: **supported** (1e-4 − 8e-4, points"
    )


def test_dynamic_sampling_is_compared_at_equal_cost():
    config = ablate_dynamic_sampling.Config().resolved()
    first = {
        "off": arm(NEAR, completions=[1000] * 5, seconds=[10.0] * 5),
        "on": arm(NEAR, completions=[4000] * 5, seconds=[20.0] * 5),
    }
    n = config.base.train.iterations
    by_rollouts, by_time = (
        ablate_dynamic_sampling.shortened(config, first, figure).train.iterations
        for figure in ("completions", "seconds")
    )
    assert (by_rollouts, by_time) == (n // 4, n // 2)


def test_figures_of_a_run():
    limits = {"eval/sampled_low": 0.1, "eval/sampled_high": 0.3}
    rows = [{"step": 0, "eval/sampled": 0.2, "eval/greedy": 0.3} | limits]
    for i in range(20):
        noise = 0.01 * (-1) ** i
        trained = {"reward/mean": 0.0, "rollout/correct": 0.02 * i + noise, "policy/entropy": i}
        rows.append({"step": i + 1, "rollout/length_mean": 5.0 + i} | trained)
    rows[-1] |= {"eval/sampled": 0.5, "eval/greedy": 0.6}
    found = figures(rows)
    assert (found["before"], found["sampled"], found["greedy"]) == (0.2, 0.5, 0.6)
    assert (found["before_low"], found["before_high"]) == (0.1, 0.3)
    assert found["length"] == 5.0 + 18.5 and found["entropy"] == 18.5  # the last two of twenty
    assert found["unsteadiness"] == pytest.approx(0.01, rel=0.1)  # the trend is not noise
    assert found["rounds"] == 1.0


def test_too_few_seeds_are_refused():
    with pytest.raises(ConfigError, match="seeds=1: no interval"):
        StudyConfig(seeds=1)


def smoke(root):
    """Six runs in one program."""
    run = RunConfig(root=root, quiet=True)
    return ablate_kl_coef.Config(run=run, smoke=True, coefs=(0.0, 0.1, 1.0), together=6)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A smoke run of an ablation, in a folder like results/."""
    root = tmp_path_factory.mktemp("study")
    assert ablate_kl_coef.main(smoke(root))
    folder = root / "results"
    folder.mkdir()
    made = root / "ablate_kl_coef" / "smoke" / "results.json"
    (folder / "ablate_kl_coef.json").write_text(made.read_text())
    results.write_page(folder)
    return root


@pytest.mark.slow
def test_an_ablation_leaves_a_table_curves_and_runs_of_its_own(published, capsys):
    made = published / "ablate_kl_coef" / "smoke"
    record = json.loads((made / "results.json").read_text())
    assert list(record["arms"]) == ["β = 0", "β = 0.1", "β = 1"]
    assert [len(a["figures"]["sampled"]) for a in record["arms"].values()] == [2, 2, 2]
    assert [finding["claim"] for finding in record["findings"]] == ["F3"]
    assert (made / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (made / "table.md").read_text() in (published / "RESULTS.md").read_text()
    runs = sorted(path.parent.name for path in made.glob("from-*/*/metrics.jsonl"))
    assert runs == [f"beta-{a}-seed-{s}" for a in ("0", "0.1", "1") for s in (0, 1)]
    run = made / "from-beta-0-seed-0" / "beta-0.1-seed-1"
    config = json.loads((run / "config.json").read_text())
    assert config["run"]["seed"] == 1 and config["algorithm"]["kl_coef"] == 0.1


@pytest.mark.slow
def test_a_finished_ablation_is_found_again(published, capsys):
    made = published / "ablate_kl_coef" / "smoke" / "results.json"
    before = json.loads(made.read_text())
    assert ablate_kl_coef.main(smoke(published))
    after = json.loads(made.read_text())
    assert after["arms"] == before["arms"] and after["findings"] == before["findings"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (None, "all the same"),
        (lambda arm: arm["figures"]["sampled"].__setitem__(0, 0.9), "sampled: DIFFERS"),
        (lambda arm: arm["estimates"]["greedy"].__setitem__(1, 0.9), "greedy: DIFFERS"),
    ],
)
def test_a_changed_number_is_noticed(published, tmp_path, capsys, change, told):
    folder = tmp_path / "results"
    folder.mkdir()
    record = json.loads((published / "results" / "ablate_kl_coef.json").read_text())
    if change:
        change(record["arms"]["β = 0.1"])
    (folder / "ablate_kl_coef.json").write_text(json.dumps(record))
    results.write_page(folder)
    checked = verify_results.Config(results=folder, arms=(), root=tmp_path / "runs")
    if change is None:
        assert verify_results.main(checked)
    else:
        with pytest.raises(SystemExit):
            verify_results.main(checked)
    assert told in capsys.readouterr().out


@pytest.mark.slow
def test_a_number_changed_in_the_page_is_noticed(published, tmp_path, capsys):
    folder = tmp_path / "results"
    folder.mkdir()
    file = "ablate_kl_coef.json"
    (folder / file).write_text((published / "results" / file).read_text())
    page = (published / "RESULTS.md").read_text()
    (tmp_path / "RESULTS.md").write_text(page.replace("| β = 1 | 2 |", "| β = 1 | 3 |"))
    with pytest.raises(SystemExit):
        verify_results.main(verify_results.Config(results=folder, arms=()))
    assert "RESULTS.md: DIFFERS" in capsys.readouterr().out


@pytest.mark.slow
def test_an_arm_trained_again_comes_out_the_same(published, capsys):
    """And one that does not is told from it, on the same platform even within the interval."""
    record = json.loads((published / "results" / "ablate_kl_coef.json").read_text())
    check, root, again = verify_results.check_arms, published / "again", smoke(published)
    labels = list(record["arms"])
    assert check("ablate_kl_coef", record, labels, root, again) == 0
    record["arms"]["β = 0.1"]["figures"]["length"][0] += 1e-9
    assert check("ablate_kl_coef", record, labels, root, again) == 1
    assert "β = 0.1, length" in capsys.readouterr().out
    record["provenance"]["python"] = "2.7"  # elsewhere the interval decides
    assert check("ablate_kl_coef", record, labels, root, again) == 0
    capsys.readouterr()
    figures = record["arms"]["β = 0.1"]["figures"]
    figures["before"] = [x + 1e-9 for x in figures["before"]]
    figures["length"] = [x + 100 for x in figures["length"]]
    assert check("ablate_kl_coef", record, labels, root, again) == 1
    told = capsys.readouterr().out
    assert re.search(r"β = 0.1, before: .*: within the interval", told)
    assert re.search(r"β = 0.1, length: .*: DIFFERS", told)


def test_intervals_of_figures():
    over_seeds = verify_results.bounds("length", {"length": [5.0, 6.0, 7.0]})
    assert 5.0 <= over_seeds[0] < 6.0 < over_seeds[1] <= 7.0
    limits = {"before": [0.2, 0.2], "before_low": [0.1, 0.1], "before_high": [0.3, 0.3]}
    assert verify_results.bounds("before", limits) == (0.1, 0.3)
    assert np.isnan(verify_results.bounds("before", {"before": [0.2]})).all()


def test_the_published_page_is_that_of_the_published_records():
    assert results.PAGE.read_text() == results.page(results.read())


@pytest.mark.parametrize("name", [name for name, x in results.read().items() if "arms" in x])
def test_the_published_findings_follow_from_the_published_seeds(name, capsys):
    """Also a golden value of which difference decides which claim, and of its sign."""
    record = results.read()[name]
    assert verify_results.check_statistics(name, record) == 0, capsys.readouterr().out
    again = {label: study.settings(arm) for label, arm in arms_of(name).items()}
    for label, arm in record["arms"].items():
        assert label not in again or config_hash(again[label]) == arm["config_hash"]


def arms_of(name):
    module = importlib.import_module(f"experiments.{name}")
    return module.arms(module.Config().resolved())


@pytest.mark.slow
def test_toys_and_changed_code_are_not_published(published, tmp_path):
    made = published / "ablate_kl_coef" / "smoke"
    folder = tmp_path / "results"
    with pytest.raises(ConfigError, match="a smoke run is no result"):
        publish.main(publish.Config(folders=(made,), results=folder))
    with pytest.raises(ConfigError, match="neither results.json nor summary.json"):
        publish.main(publish.Config(folders=(tmp_path,), results=folder))
    record = json.loads((made / "results.json").read_text()) | {"smoke": False}
    record["provenance"]["is_dirty"] = True
    (tmp_path / "results.json").write_text(json.dumps(record))
    (tmp_path / "curves.png").write_bytes((made / "curves.png").read_bytes())
    with pytest.raises(ConfigError, match="not committed"):
        publish.main(publish.Config(folders=(tmp_path,), results=folder))
    publish.main(publish.Config(folders=(tmp_path,), results=folder, changed=True))
    assert "commit" in (tmp_path / "RESULTS.md").read_text()
    assert verify_results.main(verify_results.Config(results=folder, arms=()))


def test_a_single_run_is_published_with_its_figures(tmp_path):
    run = tmp_path / "run"
    (run / "plots").mkdir(parents=True)
    (run / "plots" / "learning.png").write_bytes(b"figure")
    figures = {f"eval/sampled{end}": 0.25 for end in ("", "_low", "_high")}
    summary = {"experiment": "countdown_3to4", "before": figures, "after": figures}
    summary |= {"iterations": 4, "run_seconds": 7.0, "commit": "abcdefgh", "is_dirty": False}
    summary |= {"versions": {"jax": "0.10.2"}, "cpus": 2, "cpu": "some"}
    (run / "summary.json").write_text(json.dumps(summary))
    publish.main(publish.Config(folders=(run,), results=tmp_path / "results"))
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| sampled | 0.250 [0.250, 0.250] | 0.250 [0.250, 0.250] |" in page
    assert "4 iterations, 7 s" in page and "commit abcdefg " in page
    assert verify_results.main(verify_results.Config(results=tmp_path / "results", arms=()))


def test_policies_on_suites_are_published_with_what_was_typed(tmp_path, monkeypatch):
    run, questions = tmp_path / "run", ["q1", "q2"]
    run.mkdir()
    results_of = [
        SuiteResult("sums", {"strict": list(s)}, questions, 3.0) for s in ((0.0, 1.0), (1.0, 1.0))
    ]
    columns = [
        (name, [result]) for name, result in zip(("before", "after"), results_of, strict=True)
    ]
    typed = "python -m experiments.evaluate --limit 2 --root /tmp/here --name=/tmp/x --chat".split()
    monkeypatch.setattr(sys, "orig_argv", typed)
    write_json(run / "results.json", stages_record("evaluate", columns))
    folder = tmp_path / "results"
    publish.main(publish.Config(folders=(run,), results=folder, changed=True))
    page = (tmp_path / "RESULTS.md").read_text()
    assert "`python -m experiments.evaluate --limit 2 --chat` · intervals over questions" in page
    assert "| sums | strict | 2 | 0.500 [" in page and "; +0.500 [" in page
    assert "Answers took 6 s" in page and "curves" not in page
    assert "/tmp" not in page + (folder / "evaluate.json").read_text()
    assert verify_results.main(verify_results.Config(results=folder, arms=()))
    with pytest.raises(ConfigError, match="evaluate has no arms to train again"):
        verify_results.select(results.read(folder), ("evaluate",))


def test_unknown_arms_are_refused():
    records = {"ablate_kl_coef": {"arms": {"β = 0": {}}}}
    with pytest.raises(ConfigError, match="no record of ablate_x"):
        verify_results.select(records, ("ablate_x",))
    with pytest.raises(ConfigError, match="has no arm 'β = 3'"):
        verify_results.select(records, ("ablate_kl_coef/β = 3",))
