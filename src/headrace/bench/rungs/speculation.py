"""Tokens proposed by n-gram lookup and verified several at a time."""

from headrace.bench.rungs import Rung

RUNG = Rung(5, "speculation", "n-gram lookup proposes, the model verifies", "headrace", ({"drafter": "ngram"},))
