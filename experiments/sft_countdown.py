"""Claim: supervised fine-tuning on solver-made solutions gives a policy that half knows Countdown.

It makes (or finds) the warm start that the other Countdown experiments begin with.
"""

from experiments import cli
from experiments.common import ExperimentConfig, make_trainer, train_warm_start
from experiments.countdown import CountdownConfig
from jaxrl_llm.logging import provenance, write_json


def main(config: ExperimentConfig) -> bool:
    config = config.resolved()
    setting = config.setting()
    result, path = train_warm_start(config, setting)
    if result.is_complete:
        metrics = (
            make_trainer(config, setting, result.params, path).measure()(result.params).metrics
        )
        for name, value in metrics.items():
            print(f"{name:<22} {value:.3f}")
        write_json(path / "summary.json", {"after": metrics} | provenance())
    print(f"warm start: {path}")
    return result.is_complete


if __name__ == "__main__":
    cli.run(CountdownConfig, main, __doc__)
