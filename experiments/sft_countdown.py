"""Claim: supervised fine-tuning on solver-made solutions gives a policy that half knows Countdown.

It makes (or finds) the warm start that the other Countdown experiments begin with.
"""

from experiments import cli
from experiments.countdown import CountdownConfig, make_setting, measure, train_warm_start
from jaxrl_llm.logging import provenance, write_summary


def main(config: CountdownConfig) -> bool:
    config = config.resolved()
    result, folder = train_warm_start(config.warm_start, config.run)
    if result.is_complete:
        setting = make_setting(config.task, config.model, config.sampling.max_tokens)
        metrics = measure(setting, config.sampling, config.eval)(result.params).metrics
        for name, value in metrics.items():
            print(f"{name:<22} {value:.3f}")
        write_summary(folder, {"after": metrics} | provenance())
    print(f"warm start: {folder.path}")
    return result.is_complete


if __name__ == "__main__":
    cli.run(CountdownConfig, main, __doc__)
