"""Measuring from outside: workloads, what the machine could do at best, and reports that say how they came about.

Knows: the faces (`LLM`) and records. Refuses to know: how the engine works inside; nothing here changes what is measured.
"""
