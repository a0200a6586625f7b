"""Several processes that train together, one on each host: joining them, and agreeing.

Processes have to join before JAX starts its devices, and importing gymnax starts them. So an
experiment is started by this module, by the same line on every host:

    python -m jaxrl_llm.distributed experiments.grpo_countdown --parallel.fsdp 8

On Cloud TPU, SLURM and Kubernetes JAX finds the others by itself; elsewhere --coordinator,
--processes and --process-id say where they are. Then all processes run the same program, each on
its own devices. The first one writes: the others need to see the same files, and print nothing.
"""

import argparse
import json
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from jaxrl_llm.types import ConfigError

T = TypeVar("T")


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: int = 300,
) -> None:
    """Join the other processes; call it before anything starts JAX's devices.

    What is None is taken from the environment: Cloud TPU, SLURM, Kubernetes or Open MPI. The
    process ends, with status 2 and a line that says why, when not all have joined in time: JAX
    itself would end it without one.

    Args:
        coordinator: HOST:PORT of the first process, a port that is free there.
        processes: how many there are.
        process_id: the number of this one, from 0.
        timeout: seconds to wait for all of them.

    Raises:
        ConfigError: the settings make no sense, nothing is known about the other processes, or
            JAX's devices have been started already.
    """
    check(coordinator, processes, process_id)
    who = f"process {process_id}" if process_id is not None else "this process"
    where = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS") or "the coordinator"
    of = f"the {processes}" if processes else "all"

    def give_up() -> None:
        print(
            f"error: {who}: {of} processes had not joined at {where} after {timeout} s; expected "
            "every one of them to be started, with the same address, and process 0 to be reachable "
            "there from all hosts (a free port, no firewall); --timeout waits longer",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)  # the main thread waits within JAX

    watch = threading.Timer(timeout, give_up)
    watch.daemon = True
    watch.start()
    try:
        jax.distributed.initialize(
            coordinator, processes, process_id, initialization_timeout=timeout + 60
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cannot join other processes ({error}); expected a start on Cloud TPU, SLURM or "
            "Kubernetes, or --coordinator HOST:PORT --processes N --process-id I"
        ) from error
    finally:
        watch.cancel()


def check(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    """Raises ConfigError for what cannot be meant."""
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(
                f"coordinator={coordinator!r}: expected HOST:PORT, such as 10.0.0.1:1234"
            )
    if processes is not None and processes < 1:
        raise ConfigError(f"processes={processes}: expected at least 1")
    if process_id is not None and not 0 <= process_id < (processes or process_id + 1):
        raise ConfigError(
            f"process_id={process_id}: expected 0 to {(processes or 1) - 1}, one for each process"
        )


# Among processes that have joined; each of these does what its words say in a single process too.


def is_first() -> bool:
    """Whether this process is the one that writes files and prints."""
    return jax.process_index() == 0


def agree(function: Callable[[], T]) -> T:
    """What `function` returns in the first process, or the ConfigError that it raises, for all.

    The others do not call it. The result has to be something that JSON can write.
    """
    if jax.process_count() == 1:
        return function()
    answer: dict[str, Any] = {}
    if is_first():
        try:
            answer = {"result": function()}
        except ConfigError as error:
            answer = {"error": str(error)}
    text = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    text = multihost_utils.broadcast_one_to_all(np.resize(text, size))
    answer = json.loads(np.asarray(text, np.uint8).tobytes())
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["result"]


def any_process(claim: bool) -> bool:
    """Whether it is true in at least one process."""
    if jax.process_count() == 1:
        return claim
    return bool(multihost_utils.process_allgather(np.bool_(claim)).any())


def wait_for_all(name: str) -> None:
    """Return when every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def put(tree: PyTree, shardings: PyTree) -> PyTree:
    """Arrays on their devices. Each process gives all values, and keeps those of its devices."""

    def one(x, sharding):
        if getattr(sharding, "is_fully_addressable", True) or not getattr(
            x, "is_fully_addressable", True
        ):
            return jax.device_put(x, sharding)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = one(jax.random.key_data(x), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree, shardings)


def fetch(tree: PyTree) -> PyTree:
    """Arrays that other processes have parts of, whole on every host; others as they are."""

    def one(x):
        if getattr(x, "is_fully_addressable", True):
            return x
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(one, tree)


def main() -> None:
    """Join, and run a module as `python -m` would; when one process fails, all soon end."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.distributed",
        description="Run a module in each of several processes that train together.",
        epilog="Without --coordinator: as Cloud TPU, SLURM or Kubernetes says.",
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    parser.add_argument("--processes", type=int, metavar="N", help="how many there are")
    parser.add_argument("--process-id", type=int, metavar="I", help="number of this one, from 0")
    parser.add_argument(
        "--timeout", type=int, default=300, metavar="S", help="seconds to wait for all of them"
    )
    parser.add_argument("module", help="what to run, such as experiments.grpo_countdown")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    chosen = parser.parse_args()
    try:
        initialize(chosen.coordinator, chosen.processes, chosen.process_id, timeout=chosen.timeout)
    except ConfigError as error:
        _end(error)
    if not is_first():
        sys.stdout = open(os.devnull, "w")
    sys.argv = [chosen.module, *chosen.arguments]
    try:
        runpy.run_module(chosen.module, run_name="__main__", alter_sys=True)
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, jax.errors.JaxRuntimeError):
            print(
                "error: lost another process, or a device; start all processes again by the same "
                "line to go on from the newest checkpoint",
                file=sys.stderr,
            )
        sys.stderr.flush()
        os._exit(1)  # rather than wait for the others


def _end(error: ConfigError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
