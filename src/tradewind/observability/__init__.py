"""Listens to what the engine reports: metrics, logs, traces, the live board.

Knows: events, reports of steps and finished requests. Refuses to know: who sends them and who reads the numbers; it commands nobody.
"""
