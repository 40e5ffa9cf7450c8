"""Foundations without domain knowledge: registry, errors, units, clock, atomic files."""
