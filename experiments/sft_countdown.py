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
    warm = train_warm_start(config, setting)
    if warm.policy is None or warm.path is None:
        return warm.policy is not None
    trainer = make_trainer(config, setting, warm.policy, warm.path)
    metrics = trainer.measure()(warm.policy.params).metrics
    for name, value in metrics.items():
        print(f"{name:<22} {value:.3f}")
    write_json(warm.path / "summary.json", {"after": metrics} | provenance())
    print(f"warm start: {warm.path}")
    return True


if __name__ == "__main__":
    cli.run(CountdownConfig, main, __doc__)
