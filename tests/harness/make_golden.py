"""Makes tests/harness/: simple problems, and what lm-eval's Hugging Face model says of them.

First the weights, with jaxrl_llm; then, in an environment of its own, what torch computes of them:

    python -c "from jaxrl_llm.policy import Policy
    Policy.from_pretrained('smollm2-135m').save('smollm2')"
    pip install torch==2.13.0 transformers==5.24.0 lm-eval==0.4.13 accelerate
    python tests/harness/make_golden.py smollm2
"""

import json
import random
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PROBLEMS, GOLDEN = FOLDER / "gsm8k.jsonl", FOLDER / "smollm2.json"
N_PROBLEMS, EXAMPLES, LONGEST = 50, 2, 25

TEMPLATES = [
    ("{who} has {a} {what} and buys {b} more. How many {what} does {who} have?", "+"),
    ("{who} had {c} {what} and gave {b} away. How many {what} are left?", "-"),
    ("{who} fills {a} boxes with {b} {what} each. How many {what} are in the boxes?", "*"),
]
NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn"]
THINGS = ["apples", "books", "coins", "pens", "shells", "cards"]
COMPUTE = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def problem(rng):
    template, sign = rng.choice(TEMPLATES)
    a, b = rng.randrange(2, 10), rng.randrange(2, 10)
    first = a + b if sign == "-" else a
    words = {"who": rng.choice(NAMES), "what": rng.choice(THINGS), "a": a, "b": b, "c": a + b}
    value = COMPUTE[sign](first, b)
    answer = f"{first} {sign} {b} = {value}\n#### {value}"
    return {"question": template.format(**words), "answer": answer}


def distinct_problems():
    rng, rows = random.Random(0), []
    while len(rows) < N_PROBLEMS:
        row = problem(rng)
        if row not in rows:
            rows.append(row)
    return rows


def main(weights):
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    rows = distinct_problems()
    PROBLEMS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lm = HFLM(pretrained=weights, dtype="float32", device="cpu", batch_size=10)
    pairs = [(f"Question: {row['question']}\nAnswer:", " " + row["answer"]) for row in rows]
    scored = lm.loglikelihood(
        [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    )
    rolled = lm.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (a + b,), i) for i, (a, b) in enumerate(pairs)]
    )
    local = {
        "task": "gsm8k",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": [str(PROBLEMS)]}},
        "fewshot_split": "test",
    }
    found = simple_evaluate(
        lm,
        tasks=[{"group": "local", "task": [local]}],
        num_fewshot=EXAMPLES,
        gen_kwargs={"max_gen_toks": LONGEST},
        bootstrap_iters=0,
    )
    samples = found["samples"]["gsm8k"]
    scores = {}
    for sample in samples:
        scores.setdefault(f"exact_match,{sample['filter']}", []).append(sample["exact_match"])
    said = [s["resps"][0][0] for s in samples if s["filter"] == "strict-match"]
    golden = {"loglikelihood": scored, "rolling": rolled, "said": said, "scores": scores}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    print({name: sum(values) for name, values in scores.items()})


if __name__ == "__main__":
    main(sys.argv[1])
