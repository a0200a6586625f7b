import subprocess
import sys


def test_the_mathematics_imports_neither_flax_nor_optax():
    program = """
import sys
import jaxrl_llm.losses.grpo, jaxrl_llm.advantages, jaxrl_llm.logprobs, jaxrl_llm.masking
print(sorted({"flax", "optax", "gymnax"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_importing_the_library_starts_no_device_and_sets_no_flag():
    program = """
import jax
before = dict(jax.config.values)
import jaxrl_llm.trainer, jaxrl_llm.sft, jaxrl_llm.evaluation
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized(), before == dict(jax.config.values))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]
