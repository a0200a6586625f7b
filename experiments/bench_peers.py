"""The same iteration by other projects' trainers, each in an environment and a process of its own.

The process is told its sizes as JSON in its first argument, and then reads lines. A line such as
`{"microbatches": 8, "steps": 4}` makes a trainer, and is answered by its settings, the number of
its parameters and its versions. After it, every line `step` makes one iteration, which is answered
by its seconds and by the most memory that the process has held. So iterations can take turns with
ours, and the peer waits while we run.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import bench
from jaxrl_llm.types import ConfigError

SCRIPTS = Path(__file__).parent / "peers"
CACHE = Path.home() / ".cache" / "jaxrl_llm" / "peers"
TUNING_STEPS = 3  # of each number of microbatches, the first of which is not counted


@dataclass(frozen=True)
class PeerSpec:
    """What to install, and what to run."""

    title: str
    packages: tuple[str, ...]
    script: Path


PEERS = {
    "trl": PeerSpec(
        "TRL", ("torch==2.13.0", "trl==1.16.0", "transformers==5.24.0"), SCRIPTS / "trl_step.py"
    ),
    "tunix": PeerSpec("Tunix", ("google-tunix==0.1.7",), SCRIPTS / "tunix_step.py"),
}


def install(name: str, packages: Sequence[str], cache: Path = CACHE) -> Path:
    """The Python of an environment that has the packages; made once.

    Raises:
        ConfigError: they cannot be installed here, with pip's reason.
    """
    folder = cache / name
    python, stamp, wanted = folder / "bin" / "python", folder / "installed", "\n".join(packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {', '.join(packages)} into {folder}: minutes, this time only")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    command = [str(python), "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = reasons[-1] if reasons else done.stderr.strip()[-300:]
        raise ConfigError(f"--peer {name} cannot be installed in {folder}: {why}")
    stamp.write_text(wanted)
    return python


class Peer:
    """A peer's process.

    Args:
        command: how it is started.
        sizes: what it is told.
        log: file for everything that it prints.
    """

    def __init__(self, command: Sequence[str], sizes: dict[str, Any], log: Path):
        threads = str(sizes["threads"])
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [*command, json.dumps(sizes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"},
            )

    def start(self, microbatches: int, steps: int) -> dict[str, Any]:
        """Make a trainer of fresh weights, for so many steps; returns what it says of itself."""
        return self._ask(json.dumps({"microbatches": microbatches, "steps": steps}))

    def step(self) -> dict[str, Any]:
        """One iteration: its `seconds`, and `resident_peak_bytes`."""
        return self._ask("step")

    def _ask(self, line: str) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(line + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: there is no answer either
        answer = stdout.readline()
        if not answer:
            told = self._log.read_text().strip().splitlines()
            raise ConfigError(
                f"the peer has ended: {told[-1] if told else 'it said nothing'} (see {self._log})"
            )
        return json.loads(answer)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def sizes_of(config: "bench.Config") -> dict[str, Any]:
    """What a peer is told."""
    network = config.network
    names = ("prompts", "group_size", "prompt_tokens", "completion_tokens", "vocab")
    return {name: getattr(config, name) for name in names} | {
        "network": {
            "width": network.width,
            "layers": network.layers,
            "heads": network.heads,
            "kv_heads": network.n_kv_heads,
            "head_width": network.head_size,
            "mlp_width": network.mlp_size,
            "tie_embeddings": network.tie_embeddings,
            "dtype": network.dtype,
        },
        "threads": len(os.sched_getaffinity(0)),
    }


def tune(peer: Peer, choices: Sequence[int]) -> dict[int, float]:
    """Seconds of an iteration for each number of microbatches, the fastest of a few."""
    tried = {}
    for microbatches in choices:
        peer.start(microbatches, TUNING_STEPS)
        seconds = [peer.step()["seconds"] for _ in range(TUNING_STEPS)]
        tried[microbatches] = min(seconds[1:])
        print(f"{microbatches} microbatches: {tried[microbatches]:.3f} s", flush=True)
    return tried


def compare(ours: "bench.Bench") -> dict[str, Any]:
    """Time our iteration and the peer's in turn; returns what PEER.json holds."""
    config = ours.config
    assert config.peer is not None
    spec = PEERS[config.peer]
    python = install(config.peer, spec.packages)
    config.folder.mkdir(parents=True, exist_ok=True)
    log = config.folder / f"{config.peer}.log"
    with Peer([str(python), str(spec.script)], sizes_of(config), log) as peer:
        return against(ours, peer, spec.title)


def against(ours: "bench.Bench", peer: Peer, title: str) -> dict[str, Any]:
    """Tune the peer, then let it take turns with us."""
    config = ours.config
    choices = [n for n in config.peer_microbatches if not config.prompts % n]
    if not choices:
        raise ConfigError(
            f"peer_microbatches={config.peer_microbatches}: expected a divisor of "
            f"prompts={config.prompts} among them"
        )
    tried = tune(peer, choices) if len(choices) > 1 else {}
    best = min(choices, key=lambda n: tried.get(n, 0.0))
    machine, program = bench.make_machine(config), ours.iteration()
    told = peer.start(best, config.repeats + 1)
    theirs = []
    for _ in range(config.repeats + 1):
        machine.run()
        program.run()
        theirs.append(peer.step())
        print(
            f"turn {len(theirs) - 1} of {config.repeats}: {program.seconds[-1]:.3f} s, "
            f"{title} {theirs[-1]['seconds']:.3f} s",
            flush=True,
        )
    seconds = {"jaxrl_llm": program.seconds[1:], title: [x["seconds"] for x in theirs[1:]]}
    rows = {
        name: bench.figures(config.workload, machine, "iteration", times)
        for name, times in seconds.items()
    }
    rows["jaxrl_llm"] |= {
        "compile_seconds": program.compile_seconds,
        "resident_peak_bytes": bench.resident_peak(),
    }
    rows[title]["resident_peak_bytes"] = theirs[-1]["resident_peak_bytes"]
    pairs = [t / o for o, t in zip(*seconds.values(), strict=True)]
    return bench.described(ours, machine) | {
        "peer": told | {"title": title, "microbatches": best, "seconds_by_microbatches": tried},
        "rows": rows,
        "ratio": statistics.median(pairs),
        "ratios": pairs,
    }


def table(result: dict[str, Any]) -> str:
    """Both sides, the ratio, and how the peer was set."""
    peer, ratios = result["peer"], result["ratios"]
    versions = ", ".join(f"{name} {version}" for name, version in peer["versions"].items())
    tried = ", ".join(f"{n}: {s:.2f} s" for n, s in peer["seconds_by_microbatches"].items())
    settings = ", ".join(f"{name}={value}" for name, value in peer["settings"].items())
    chosen = f"its microbatches tried: {tried}" if tried else "its microbatches were given"
    return (
        f"{bench.table(result['rows'])}\n\n"
        f"{peer['title']} takes {result['ratio']:.2f} times as long: median of {len(ratios)} pairs "
        f"from {min(ratios):.2f} to {max(ratios):.2f}\n"
        f"{versions}; {peer['parameters']:,} parameters; {settings}\n"
        f"{chosen}"
    )
