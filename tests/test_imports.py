import subprocess
import sys


def test_the_mathematics_imports_neither_flax_nor_optax():
    program = """
import pkgutil, sys
import jaxrl_llm.losses
import jaxrl_llm.advantages, jaxrl_llm.controllers, jaxrl_llm.logprobs, jaxrl_llm.masking
for module in pkgutil.iter_modules(jaxrl_llm.losses.__path__, "jaxrl_llm.losses."):
    __import__(module.name)
assert "jaxrl_llm.losses.family" in sys.modules
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
