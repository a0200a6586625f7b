"""Metadata, dependencies and extras; tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

readme = Path(__file__).with_name("README.md")

# Files of pretrained models and of data beside safetensors.
hf = [
    "gguf>=0.19",
    "pyarrow>=21",  # problems in parquet files
]
# What runs notebooks outside of Colab.
notebooks = [
    "ipykernel>=7.1",  # the kernel python3
    "nbclient>=0.10.4",
    "nbformat>=5.10",  # cell ids, which the notebooks have, are of format 4.5
]
# Other tasks to measure a policy on.
evaluation = [
    "lm-eval>=0.4.10",
    "math-verify>=0.8",  # whether two expressions are equal
    "reasoning-gym>=0.1.25",
]
test = [
    *hf,
    *evaluation,
    *notebooks,
    "pytest>=9.0",
    "pytest-xdist>=3.8",
    "rlax>=0.1.9",  # a second opinion on GAE and the clipped loss
    "tensorboard>=2.21",  # reads back the events that tensorboardX wrote
]

setup(
    name="jaxrl_llm",
    version="0.1.0",
    description="PPO, GRPO and DAPO for language models as compiled JAX programs",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    author="The jaxrl_llm developers",
    license="Apache-2.0",
    packages=find_packages(include=["jaxrl_llm", "jaxrl_llm.*", "experiments", "experiments.*"]),
    python_requires=">=3.11",
    install_requires=[
        "jax>=0.10.2,<0.12",  # the upper bound is gymnax's
        "flax>=0.12.8",
        "optax>=0.2.8",
        "gymnax>=1.0.1",
        "gymnasium>=1.2",  # environments for agents of others; gymnax needs it too
        "six>=1.16",  # gymnax imports it without declaring it
        "chex>=0.1.92",
        "orbax-checkpoint>=0.12.8",
        "tensorboardX>=2.6.5",
        "transformers>=5.0",  # tokenizers, chat templates and configs; needs no torch for them
        "safetensors>=0.8",
        "jinja2>=3.1.6",  # chat templates; transformers does not require it
        "tyro>=1.0",
        "jaxtyping>=0.3.11",
        "tqdm>=4.67",
        "matplotlib>=3.10",
        "scipy>=1.16",
        "numpy>=2.3",
        "jsonschema>=4.26",  # describes and checks the arguments of tools
    ],
    extras_require={
        "test": test,
        "dev": [*test, "ruff>=0.17,<0.18", "pyright[nodejs]>=1.1.414"],
        "hf": hf,
        "eval": evaluation,
        "notebooks": notebooks,
    },
)
