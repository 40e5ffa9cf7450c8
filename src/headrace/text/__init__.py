"""Text on both sides of the engine, without torch: tokenizer, chat template, detokenizing, stop strings, logprob texts.

The parts are imported from their modules (`text.tokenizer`, `text.template`, `text.stream`, …); importing this package
loads nothing heavy.
"""
