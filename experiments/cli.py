"""The command line of every experiment: one dataclass in, one exit status out."""

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import tyro

from jaxrl_llm.types import ConfigError

C = TypeVar("C")


def run(config_type: type[C], main: Callable[[C], object], description: str | None) -> None:
    """Parse the command line into `config_type`, call `main`, and turn errors into one line.

    The compilation cache is switched on, so a second start compiles nothing; set
    JAX_COMPILATION_CACHE_DIR to move it. Exit status: 0 done, 2 bad input, 130 interrupted.
    """
    try:
        # A paragraph of its own for each line of the list at the end.
        paragraphs = re.sub(r"\n(?=(Command|Expected|Time) )", "\n\n", description or "")
        # Without subcommands, an optional group of settings such as rope_scaling is left out.
        settings = (tyro.conf.AvoidSubcommands,)
        config = tyro.cli(
            config_type, default=defaults(config_type), description=paragraphs, config=settings
        )
        use_compilation_cache()
        with jax.default_matmul_precision(getattr(config, "matmul_precision", None)):
            finished = main(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(130 if finished is False else 0)


def defaults(config_type: type[C]) -> C:
    """The config's defaults, which depend on --model where there is such a choice."""
    for_model = getattr(config_type, "for_model", None)
    if for_model is None:
        return config_type()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default="tiny")
    return for_model(parser.parse_known_args()[0].model)


def use_compilation_cache() -> None:
    """Keep compiled programs in ~/.cache/jaxrl_llm unless the environment names a folder."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = Path.home() / ".cache" / "jaxrl_llm" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
