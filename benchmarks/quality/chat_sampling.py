"""How often a small model's answer names the right thing, by how it is sampled: behind the defaults of `headrace chat`.

    python benchmarks/quality/chat_sampling.py

Forty seeded answers to each of four plain questions under each sampling; an answer is right if it holds the word. The intervals
are Wilson's, at 95 %, over answers taken as independent, which those to one question are not quite. Answers are kept in the record.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.base.files import write_atomic
from headrace.base.host import host

QUESTIONS = (
    ("What is the capital of France?", r"\bparis\b"),
    ("Which planet is the largest of the solar system?", r"\bjupiter\b"),
    ("How many days are in a week?", r"\b(seven|7)\b"),
    ("What do we call water that is frozen?", r"\bice\b"),
)
SAMPLINGS = ({"temperature": 1.0}, {"temperature": 0.8, "min_p": 0.05}, {"temperature": 0.6, "min_p": 0.1})
RECORD = Path(__file__).parents[1] / "records" / "chat" / "sampling-smollm2-135m.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--answers", type=int, default=40, help="to each question")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--record", type=Path, default=RECORD)
    a = parser.parse_args()
    with LLM(a.model, backend=a.backend, threads=a.threads) as llm:
        rows = [asked(llm, sampling, a.answers, a.max_tokens) for sampling in SAMPLINGS]
    record = {
        "schema": "headrace-chat-sampling/1",
        "command": "python benchmarks/quality/chat_sampling.py",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": host(),
        "model": a.model,
        "backend": a.backend,
        "max_tokens": a.max_tokens,
        "rows": rows,
    }
    write_atomic(a.record, json.dumps(record, indent=1) + "\n")
    for row in rows:
        low, high = row["interval"]
        print(f"{row['sampling']}: {row['right']} of {row['answers']}, {row['share']:.0%} ({low:.0%}-{high:.0%})")


def asked(llm: LLM, sampling: dict[str, float], answers: int, max_tokens: int) -> dict[str, Any]:
    questions = []
    for question, word in QUESTIONS:
        prompt = llm.chat_prompt([{"role": "user", "content": question}])
        params = SamplingParams(n=answers, seed=1, max_tokens=max_tokens, **sampling)
        texts = [found.text for found in llm.generate([prompt], params)]
        right = sum(re.search(word, text, re.IGNORECASE) is not None for text in texts)
        questions.append({"question": question, "word": word, "right": right, "texts": texts})
    total = answers * len(QUESTIONS)
    right = sum(q["right"] for q in questions)
    return {
        "sampling": sampling, "answers": total, "right": right, "share": right / total,
        "interval": wilson(right, total), "questions": questions,
    }  # fmt: skip


def wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    share = hits / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (middle - half) / (1 + z * z / total), (middle + half) / (1 + z * z / total)


if __name__ == "__main__":
    main()
