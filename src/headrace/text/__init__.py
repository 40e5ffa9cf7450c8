"""Text to tokens and back: tokenizer, chat template, incremental detokenizer, stop matching. Imports no torch."""
