"""Choosing by figures: what each technique brings on a user's own traffic, what breaks first under another one, what to plan next.

Knows: plans, their variants, and how a simulation or a measured run of them compares. Refuses to know: how an engine works inside.
"""
