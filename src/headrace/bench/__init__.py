"""Load tests with intervals against any OpenAI-compatible endpoint. Imports no torch."""
